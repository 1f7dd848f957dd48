// The page's script: colours of the page, and the explorer of single images. Everything comes from the JSON in the page;
// texts are set as text, never as markup. A build... function draws one part for an image; if the radius matters to
// it, it returns a function that brings it to a step of the grid of radii, so that the slider changes only what it must.
(() => {
"use strict";

const byId = (id) => document.getElementById(id);

/** A new element: properties by name, then children (elements or strings). */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A number with three digits; mode rounds down what is proved and up what is a bound, so that neither is overstated. */
function number(x, mode = Math.round) {
  if (x === null || x === undefined) return "not known";
  if (x === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(x)));
  const slack = mode === Math.floor ? 1e-9 : mode === Math.ceil ? -1e-9 : 0;  // 0.57 * 1000 is not quite 570
  let digits = mode(Math.abs(power) > 20 ? x / 10 ** (power - 2) : x * 10 ** (2 - power) + slack);
  const back = power < 2 ? digits / 10 ** (2 - power) : digits * 10 ** (power - 2);
  if (mode === Math.floor && back > x) digits -= 1;
  if (mode === Math.ceil && back < x) digits += 1;
  if (power < -3 || power > 5) return `${sign((digits / 100).toFixed(1))}×10${raised(power)}`;
  return sign((digits * 10 ** (power - 2)).toFixed(Math.max(0, 2 - power)));
}
const proved = (x) => number(x, Math.floor);
const bound = (x) => number(x, Math.ceil);
const sign = (text) => text.replace("-", "−");
const raised = (power) => String(power).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻");
const count = (n) => n.toLocaleString("en");
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// ---------------------------------------------------------------------------------------------------- colours of the page

function startTheme() {
  const button = byId("theme"), root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = dark() ? "Light mode" : "Dark mode"; };
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; name(); };
  system.addEventListener("change", name);
  name();
}

/** Drawings that are wider than their column can be scrolled with the keyboard. */
function startScrollers() {
  const observer = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (target.scrollWidth > target.clientWidth + 1) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }));
  document.querySelectorAll(".drawing").forEach((area) => observer.observe(area));
}

// ------------------------------------------------------------------------------------------------------------- the pixels

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

/** Paint values(i) in 0 ... 255, i in C,H,W order, onto the canvas. */
function paint(canvas, [channels, height, width], values) {
  const size = height * width;
  canvas.width = width;
  canvas.height = height;
  const picture = new ImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) picture.data[4 * i + c] = values(channels === 3 ? c * size + i : i);
    picture.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(picture, 0, 0);
}

/** 256 colours from the dark plate over amber to nearly white, as 32-bit words; the first step is seen at once. */
const GLOW = (() => {
  const stops = [[18, 21, 27], [232, 132, 40], [255, 244, 214]], table = new Uint8ClampedArray(1024);
  for (let i = 0; i < 256; i++) {
    const place = i ? 0.25 + 1.75 * (i / 255) : 0, k = Math.min(Math.floor(place), 1);
    for (let c = 0; c < 3; c++) table[4 * i + c] = stops[k][c] + (place - k) * (stops[k + 1][c] - stops[k][c]);
    table[4 * i + 3] = 255;
  }
  return new Uint32Array(table.buffer);
})();

// ------------------------------------------------------------------------------------------------------- words and scales

const VERDICTS = { CERTIFIED: "certified", UNKNOWN: "unknown", ATTACKED: "attacked", MISCLASSIFIED: "misclassified" };
const GUARANTEES = { high_probability: "high probability", deterministic: "deterministic", estimate: "estimate, no proof" };

let network = null, shown = [], chosen = null, step = 0, updates = [];

const isProof = () => network.guarantee !== "estimate";  // "certified" is said of proofs alone
const className = (k) => network.classes[k] ?? `class ${k}`;
const verdictWords = (verdict) => (
  verdict === "CERTIFIED" && !isProof() ? "estimated robust (no proof)" : VERDICTS[verdict] ?? verdict);
const radiusWords = () => (isProof() ? "certified radius" : "estimated radius (no proof)");
const epsWords = () => (network.eps_text.includes("/") ? `eps, ${network.eps_text} =` : "eps");
const percent = (x) => `${Math.round(100 * x)} %`;

/** About five round numbers from low to high. */
function ticks(low, high) {
  const rough = (high - low) / 5, base = 10 ** Math.floor(Math.log10(rough));
  const width = base * [1, 2, 5, 10].find((k) => k * base >= rough);
  const found = [];
  for (let k = Math.ceil(low / width - 1e-9); k * width <= high + 1e-9 * width; k++) found.push(k * width);
  return found;
}

function tickRow(values, place) {
  const track = make("div", { className: "track ticks", "aria-hidden": "true" });
  for (const value of values) {
    const tick = make("span", {}, Math.abs(value) < 1e-12 ? "0" : sign(String(Number(value.toPrecision(6)))));
    tick.style.left = `${place(value)}%`;
    track.append(tick);
  }
  return track;
}

function row(name, track, amount, kind = "") {
  return make("div", { className: `row ${kind}` }, make("span", { className: "name", title: name }, name), track, amount);
}

function stretch(element, from, to) {
  element.style.left = `${from}%`;
  element.style.width = `${Math.max(to - from, 0)}%`;
}

// ------------------------------------------------------------------------------------------------- the parts of one image

function buildPortrait(image) {
  byId("who").textContent = `Image ${image.index}: ${className(image.label)}`;
  const pixels = bytes(image.pixels);
  paint(byId("large"), network.shape, (i) => pixels[i]);
  byId("large").setAttribute("aria-label", `Image ${image.index}, ${className(image.label)}`);
  const facts = [
    ["Predicted", className(image.prediction)],
    ["Verdict", `${verdictWords(image.verdict)} at ${network.eps_text}`],
    ["Decided by", image.decided_by],
    ["Guarantee", GUARANTEES[network.guarantee] ?? network.guarantee],
  ];
  byId("facts").replaceChildren(...facts.filter(([, value]) => value)
    .flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function buildSentence(image) {
  const name = className(image.label);
  return (at) => {
    const radius = network.grid[at], margin = image.margin[at], holds = margin !== null && margin > 0;
    const where = radius === 0 ? "At the image itself" : `Within radius ${holds ? proved(radius) : number(radius)}`;
    const claim = holds ? `is ${isProof() ? "proved" : "estimated"} to lead by at least ${proved(margin)}`
      : `is not ${isProof() ? "proved" : "estimated"} to lead`;
    byId("sentence").replaceChildren(`${where} the label ${name} `, make("span", { className: holds ? "yes" : "no" }, claim),
      holds ? ` over every other class${isProof() ? "." : "; this is no proof."}` : whyNot(image, radius));
  };
}

function whyNot(image, radius) {
  if (image.prediction !== image.label) return `: the network takes the image for ${className(image.prediction)}.`;
  if (image.attacked !== null && image.attacked <= radius) return ": an attack succeeds.";
  return ", and no attack is known that succeeds.";
}

/** The axis of distances: what is proved, what is broken, and the gap where neither is known. */
function buildAxis(image) {
  const { grid, eps } = network, { radius, attacked } = image;
  const wrong = image.prediction !== image.label, open = !wrong && !(attacked !== null && attacked <= radius);
  const end = 1.02 * Math.max(grid[grid.length - 1], eps, radius ?? 0, attacked ?? 0);
  const place = (x) => 100 * x / end;
  const track = make("div", { className: "track", "aria-hidden": "true" });
  const stripe = (kind, from, to) => {
    const element = track.appendChild(make("span", { className: kind }));
    if (to === undefined) element.style.left = `${place(from)}%`;
    else stretch(element, place(from), place(to));
    return element;
  };
  if (open) stripe("gap", radius ?? 0, attacked ?? end);
  if (radius) stripe("safe", 0, radius);
  if (attacked !== null) { stripe("broken", attacked, end); stripe("attacked", attacked); }
  stripe("eps", eps);
  const here = stripe("here", 0), reading = make("b");
  const mark = (kind, text, value) => make("li", {}, make("span", { className: `mark ${kind}` }), `${text} `, value);
  const value = (text) => make("b", {}, text);
  const marks = [mark("here", "chosen radius", reading), mark("eps", epsWords(), value(number(eps)))];
  if (radius) marks.unshift(mark("safe", `${radiusWords()}${image.tried ? ", at least" : ""}`, value(proved(radius))));
  if (attacked !== null) marks.push(mark("attacked", "attack succeeds at", value(number(attacked))));
  if (open) marks.push(mark("gap", "neither proved nor broken", ""));
  byId("axis").replaceChildren(
    make("div", { className: "scale" }, track, tickRow(ticks(0, end), place)),
    make("ul", { className: "marks" }, ...marks),
    make("p", { className: "fine" }, explain(image, wrong)),
  );
  return (at) => {
    here.style.left = `${place(grid[at])}%`;
    reading.textContent = number(grid[at]);
  };
}

function explain(image, wrong) {
  const { radius, attacked } = image;
  if (wrong) return "The image is classified wrongly as it is, so there is nothing to certify.";
  const safe = radius
    ? `${isProof() ? "Certified" : "Estimated to be safe (no proof)"} up to ${proved(radius)}${image.tried
      ? " at least: only the radii of the slider were tried" : ""}.`
    : `No radius is ${isProof() ? "certified" : "estimated to be safe"}.`;
  if (attacked === null) return `${safe} No attack succeeded at any distance tried; what lies beyond is open.`;
  if (radius && attacked <= radius) {
    return `${safe} An attack succeeds at ${number(attacked)} all the same: ${isProof()
      ? "this must not happen, so the proof or the attack is at fault; please report it." : "the estimate is wrong here."}`;
  }
  return `${safe} An attack succeeds at ${number(attacked)}. In the shaded gap between the two nothing is known: a tighter bound
    would move its left end, a stronger attack its right end.`.replace(/\s+/g, " ");
}

/** The classes to draw, by falling logit: all of up to twelve, else the label and those that come highest. */
function drawnClasses(image) {
  const all = image.logits.map((_, k) => k), highest = image.upper[image.upper.length - 1];
  const kept = all.length <= 12 ? all
    : [image.label, ...all.filter((k) => k !== image.label).sort((a, b) => highest[b] - highest[a]).slice(0, 11)];
  return kept.sort((a, b) => image.logits[b] - image.logits[a]);
}

/** The span of the axis of logits: what the largest radius needs, but so that the logits themselves stay apart. */
function logitSpan(image, classes) {
  const last = image.lower.length - 1, own = classes.map((k) => image.logits[k]);
  const low = Math.min(...own), high = Math.max(...own), spread = Math.max(high - low, 1e-6);
  const need = (side, k, other) => side[last][k] ?? other;  // null stands for no bound
  return [
    Math.max(Math.min(...classes.map((k) => need(image.lower, k, -Infinity))), low - 2 * spread) - 0.03 * spread,
    Math.min(Math.max(...classes.map((k) => need(image.upper, k, Infinity))), high + 2 * spread) + 0.03 * spread,
  ];
}

function buildLogits(image) {
  const classes = drawnClasses(image), [low, high] = logitSpan(image, classes);
  const place = (x) => clamp(100 * (x - low) / (high - low), 0, 100);
  const lines = classes.map((k) => {
    const [bar, over, dot, cut] = ["span", "over", "dot", "cut"].map((kind) => make("span", { className: kind }));
    const amount = make("span", { className: "amount" });
    dot.style.left = `${place(image.logits[k])}%`;
    const track = make("div", { className: "track", "aria-hidden": "true" }, bar, over, cut, dot);
    return { k, bar, over, cut, amount, element: row(className(k), track, amount, k === image.label ? "label" : "") };
  });
  byId("logits").replaceChildren(make("div", { className: "rows" }, ...lines.map((line) => line.element),
    row("", tickRow(ticks(low, high), place), "")));
  const left = image.logits.length - classes.length;
  return (at) => {
    const lower = (k) => image.lower[at][k] ?? -Infinity, upper = (k) => image.upper[at][k] ?? Infinity;
    const floor = lower(image.label);
    let overlaps = 0;
    for (const { k, bar, over, cut, amount } of lines) {
      stretch(bar, place(lower(k)), place(upper(k)));
      cut.style.left = `${place(floor)}%`;
      const crossing = k !== image.label && upper(k) >= floor;
      over.hidden = !crossing;
      if (crossing) stretch(over, place(Math.max(floor, lower(k))), place(upper(k)));
      amount.textContent = `${proved(image.lower[at][k])} … ${bound(image.upper[at][k])}`;
      overlaps += crossing;
    }
    byId("logits-note").textContent = logitNote(overlaps, image.margin[at] > 0, left);
  };
}

function logitNote(overlaps, holds, left) {
  const parts = ["The dashed line is the lower end of the label's interval, each short tick the logit at the image itself."];
  if (!overlaps) parts.push("No other interval reaches it; the lead that is proved may be larger than the gap, as classes are compared in pairs.");
  else {
    parts.push(`${overlaps === 1 ? "One other interval reaches" : `${overlaps} other intervals reach`} beyond it.`);
    parts.push(holds
      ? "The lead holds all the same: classes are compared in pairs, and two logits need not take their worst values at one point."
      : "That alone refutes nothing: classes are compared in pairs, so a lead can be proved though intervals overlap.");
  }
  if (left) parts.push(`The label and those that come highest at the largest radius are drawn; ${left} other classes are not.`);
  return parts.join(" ");
}

function buildLayers(image) {
  const values = bytes(image.maps), radii = network.grid.length;
  let start = 0;
  const layers = network.layers.map((layer) => {
    const [height, width] = layer.map, size = height * width;
    const canvas = make("canvas", { width, height, role: "img", "aria-label": `Units of ${layer.title} that can change` });
    canvas.style.maxWidth = width < height ? percent(width / height) : "";
    const drawing = canvas.getContext("2d"), picture = new ImageData(width, height);
    const text = make("p");
    const element = make("div", { className: "layer" }, make("h4", {}, layer.title),
      make("div", { className: "plate" }, canvas), text);
    const built = { layer, element, drawing, picture, words: new Uint32Array(picture.data.buffer), start, size, text };
    start += radii * size;
    return built;
  });
  byId("layers").replaceChildren(...layers.map((built) => built.element));
  return (at) => layers.forEach(({ layer, drawing, picture, words, start: first, size, text }, k) => {
    const from = first + at * size, free = image.varying[at][k];
    for (let i = 0; i < size; i++) words[i] = GLOW[values[from + i]];
    drawing.putImageData(picture, 0, 0);
    text.replaceChildren(make("b", {}, count(free)),
      ` of ${count(layer.units)} units can change; ${count(layer.units - free)} rows and columns removed`);
  });
}

function buildRadii(image) {
  const { grid } = network, wide = network.global_lipschitz, last = grid[grid.length - 1], first = grid.find((r) => r > 0) ?? 1;
  const positive = image.lipschitz.flatMap((bounds, e) => bounds.map((l) => l * grid[e])).concat(wide.map((l) => l * first))
    .filter((x) => x > 0);
  const top = Math.ceil(Math.log10(Math.max(...wide.map((l) => (l ?? 0) * last), ...positive, 1e-12)));
  const bottom = Math.max(Math.floor(Math.log10(Math.min(...positive, 10 ** (top - 1)))), top - 7);
  const powers = Array.from({ length: top - bottom + 1 }, (_, k) => 10 ** (bottom + k));
  const place = (x) => (x > 0 ? clamp(100 * (Math.log10(x) - bottom) / (top - bottom), 0, 100) : 0);
  const lines = wide.map((everywhere, k) => {
    const near = make("span", { className: "near" }), far = make("span", { className: "wide" });
    const amount = make("span", { className: "amount" });
    const name = network.layers[k]?.title ?? "logits";
    return { k, everywhere, near, far, amount,
      element: row(name, make("div", { className: "track pair", "aria-hidden": "true" }, near, far), amount) };
  });
  byId("radii").replaceChildren(make("div", { className: "rows" }, ...lines.map((line) => line.element),
    row("", tickRow(powers, place), "")));
  return (at) => {
    for (const { k, everywhere, near, far, amount } of lines) {
      const local = image.lipschitz[at][k], reach = (l) => (l === null ? null : l * grid[at]);
      stretch(near, 0, local === null ? 100 : place(reach(local)));
      stretch(far, 0, everywhere === null ? 100 : place(reach(everywhere)));
      amount.textContent = `${bound(reach(local))} / ${bound(reach(everywhere))}`;
    }
  };
}

function buildAdversary(image) {
  const place = byId("adversary"), { adversary } = image;
  if (!adversary) {
    place.replaceChildren(make("p", { className: "fine" }, image.prediction !== image.label
      ? "The image is classified wrongly as it is: no attack is needed." : "No attack succeeded on this image."));
    return;
  }
  const pixels = bytes(image.pixels), difference = new Int8Array(bytes(adversary.difference).buffer);
  const unit = 255 * adversary.scale / 127, factor = amplification(adversary.scale);
  const picture = (values, text) => {
    const canvas = make("canvas", { role: "img", "aria-label": text });
    paint(canvas, network.shape, values);
    return make("figure", {}, canvas, make("figcaption", {}, text));
  };
  place.replaceChildren(make("div", { className: "three" },
    picture((i) => pixels[i], `The image: ${className(image.prediction)}`),
    picture((i) => pixels[i] + unit * difference[i], `At distance ${number(adversary.distance)}: ${className(adversary.class)}`),
    picture((i) => 127.5 + factor * unit * difference[i], `Their difference, × ${factor}, grey for none`)));
}

/** The largest of 1, 2, 5, 10, ... by which the largest difference still fits between grey and white. */
function amplification(scale) {
  if (!(scale > 0)) return 1;
  const base = 10 ** Math.floor(Math.log10(0.5 / scale));
  return Math.max(1, base * [5, 2, 1].find((k) => k * base <= 0.5 / scale));
}

// ----------------------------------------------------------------------------------------- the gallery and what is chosen

const BUILDERS = [buildPortrait, buildSentence, buildAxis, buildLogits, buildLayers, buildRadii, buildAdversary];

function choose(image) {
  chosen = image;
  updates = BUILDERS.map((build) => build(image)).filter(Boolean);
  byId("detail").hidden = false;
  for (const thumb of byId("gallery").querySelectorAll(".thumb")) {
    thumb.setAttribute("aria-selected", shown[thumb.dataset.place] === image);
    thumb.tabIndex = shown[thumb.dataset.place] === image ? 0 : -1;
  }
  move(step);
}

/** Names below the slider at 0 and at whole multiples of eps. */
function notches() {
  const { grid, eps } = network, last = Math.max(grid.length - 1, 1);
  return grid.flatMap((radius, k) => {
    const times = Math.round(radius / eps);
    if (Math.abs(radius - times * eps) > 1e-6 * eps) return [];
    const mark = make("span", {}, times === 0 ? "0" : times === 1 ? "eps" : `${times} eps`);
    mark.style.left = `${100 * k / last}%`;
    return [mark];
  });
}

/** Bring everything to a step of the grid of radii. */
function move(to) {
  step = to;
  const radius = network.grid[step], share = `${percent(radius / network.eps)} of ${network.eps_text}`;
  byId("radius").value = step;
  byId("radius").setAttribute("aria-valuetext", `${number(radius)}, ${share}`);
  byId("place").replaceChildren(make("b", {}, number(radius)), ` ${share}`);
  for (const update of updates) update(step);
}

function thumbnail(image, place) {
  const canvas = make("canvas", { "aria-hidden": "true" }), pixels = bytes(image.pixels);
  paint(canvas, network.shape, (i) => pixels[i]);
  const radius = image.radius ? proved(image.radius) : image.prediction === image.label ? "none" : "wrong";
  const known = image.radius ? `${radiusWords()} ${radius}` : `no ${radiusWords()}`;
  const thumb = make("div", { className: "thumb", role: "option", tabIndex: -1, "aria-selected": image === chosen,
    "aria-label": `Image ${image.index}, ${className(image.label)}, ${verdictWords(image.verdict)}, ${known}`,
    title: `${className(image.label)}, ${verdictWords(image.verdict)}` }, canvas, radius);
  thumb.dataset.place = place;
  return thumb;
}

const ORDERS = {
  largest: (a, b) => (b.radius ?? -1) - (a.radius ?? -1) || a.index - b.index,
  smallest: (a, b) => (a.radius ?? Infinity) - (b.radius ?? Infinity) || a.index - b.index,
  index: (a, b) => a.index - b.index,
  class: (a, b) => a.label - b.label || a.index - b.index,
};

function fillGallery() {
  const verdict = byId("verdict").value, label = byId("class").value, least = Number(byId("least").value) || 0;
  shown = network.images.filter((image) => (!verdict || image.verdict === verdict) && (!label || image.label === Number(label))
    && (image.radius ?? 0) >= least).sort(ORDERS[byId("sort").value]);
  byId("count").textContent = `${shown.length} of ${network.images.length} images`;
  byId("gallery").replaceChildren(...shown.map(thumbnail));
  byId("gallery").hidden = !shown.length;
  byId("keys").textContent = shown.length ? "Click an image, or move through them with the arrow keys."
    : "No image passes these filters.";
  byId("detail").hidden = !shown.length;
  if (chosen && shown.length && !shown.includes(chosen)) choose(shown[0]);
  if (shown.length) byId("gallery").children[Math.max(shown.indexOf(chosen), 0)].tabIndex = 0;
}

/** Arrow keys move through the gallery, by lines up and down; what is reached is chosen. */
function onKey(event) {
  const thumbs = [...byId("gallery").querySelectorAll(".thumb")], now = thumbs.indexOf(document.activeElement);
  if (now < 0) return;
  const top = thumbs[0].offsetTop, below = thumbs.findIndex((thumb) => thumb.offsetTop > top);
  const line = below < 0 ? thumbs.length : below;
  const target = { ArrowRight: now + 1, ArrowLeft: now - 1, ArrowDown: now + line, ArrowUp: now - line, Home: 0,
    End: thumbs.length - 1, Enter: now, " ": now }[event.key];
  if (target === undefined) return;
  event.preventDefault();
  if (!thumbs[target]) return;
  choose(shown[target]);
  thumbs[target].focus();
}

function fillSelect(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", { value }, text)));
}

function openNetwork(which) {
  network = which;
  chosen = null;
  byId("detail").hidden = true;
  byId("nothing").hidden = network.images.length > 0;
  byId("nothing").textContent = `No images of ${network.name} were stored in this report, so there is nothing to explore.`;
  byId("keys").hidden = !network.images.length;
  const verdicts = Object.keys(VERDICTS).filter((v) => network.images.some((image) => image.verdict === v));
  const labels = [...new Set(network.images.map((image) => image.label))].sort((a, b) => a - b);
  fillSelect(byId("verdict"), [["", "all"], ...verdicts.map((v) => [v, verdictWords(v)])]);
  fillSelect(byId("class"), [["", "all"], ...labels.map((k) => [k, className(k)])]);
  byId("least").value = 0;
  byId("least").step = 10 ** Math.floor(Math.log10(network.eps / 2));
  byId("radius").max = network.grid.length - 1;
  byId("notches").replaceChildren(...notches());
  const away = network.grid.map((radius) => Math.abs(radius - network.eps));
  step = away.indexOf(Math.min(...away));
  fillGallery();
  if (shown.length) choose(shown[0]);
}

function startExplorer() {
  const { networks } = JSON.parse(byId("explorer-data").textContent);
  if (!networks.length) {
    byId("nothing").textContent = "No network was stored in this report, so there is nothing to explore.";
    byId("nothing").hidden = false;
    return;
  }
  fillSelect(byId("network"), networks.map((one, k) => [k, one.name]));
  byId("network-label").hidden = networks.length < 2;
  byId("network").onchange = () => openNetwork(networks[byId("network").value]);
  for (const id of ["sort", "verdict", "class"]) byId(id).onchange = fillGallery;
  byId("least").oninput = fillGallery;
  byId("radius").oninput = () => move(Number(byId("radius").value));
  byId("gallery").onkeydown = onKey;
  byId("gallery").onclick = (event) => {
    const thumb = event.target.closest(".thumb");
    if (thumb) { choose(shown[thumb.dataset.place]); thumb.focus(); }
  };
  byId("choice").hidden = false;
  openNetwork(networks[0]);
}

startTheme();
startScrollers();
if (byId("explorer-data")) startExplorer();
})();
