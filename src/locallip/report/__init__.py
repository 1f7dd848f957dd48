"""The report: figures of runs and an explorer of single images, in one HTML file."""
