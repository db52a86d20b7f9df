// Regions that are drawn again by the server: <div data-live="URL of an event stream">.
// A hidden page has no stream: browsers allow six connections to a server, of all tabs together.
"use strict";

const RETRY_MS = 5000;
const LIVE_MS = 5000; // after a sample; then the page says of when it is

for (const region of document.querySelectorAll("[data-live]")) {
  const state = document.querySelector("[data-live-state]");
  const button = document.querySelector("[data-live-pause]");
  let source = null;
  let retry = 0;
  let aging = 0;

  function say(text) {
    // Said once, not with every sample.
    if (state.textContent !== text) state.textContent = text;
  }

  function draw(html) {
    const focused = region.contains(document.activeElement) ? document.activeElement.id : "";
    const selection = document.getSelection();
    if (!selection.isCollapsed && region.contains(selection.anchorNode)) return;
    region.innerHTML = html;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }

  function age() {
    clearTimeout(aging);
    const text = "as of " + new Date().toLocaleTimeString();
    aging = setTimeout(() => say(text), LIVE_MS);
  }

  function close() {
    clearTimeout(retry);
    clearTimeout(aging);
    source?.close();
    source = null;
  }

  function open() {
    close();
    if (document.hidden || button.getAttribute("aria-pressed") === "true") return;
    age();
    source = new EventSource(region.dataset.live);
    source.addEventListener("update", (event) => {
      say("live");
      age();
      draw(event.data);
    });
    source.addEventListener("gone", (event) => {
      say("not live: " + event.data);
      close();
      retry = setTimeout(() => location.reload(), RETRY_MS);
    });
    source.addEventListener("error", () => {
      say("not live: connecting");
      close();
      retry = setTimeout(open, RETRY_MS);
    });
  }

  button.addEventListener("click", () => {
    const paused = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(paused));
    say(paused ? "paused" : "as of now");
    open();
  });
  document.addEventListener("visibilitychange", open);
  addEventListener("pagehide", close);
  open();
}

// A box that chooses all others of its form.
for (const label of document.querySelectorAll("[data-choose]")) {
  const all = label.querySelector("input");
  label.hidden = false;
  all.addEventListener("change", () => {
    for (const box of all.form.querySelectorAll("input[name=handles]")) box.checked = all.checked;
  });
}
