// Wide tables scroll in frames of their own, which the keyboard must reach as well.
new MutationObserver(() => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) frame.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
