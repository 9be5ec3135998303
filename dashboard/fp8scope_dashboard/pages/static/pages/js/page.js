// Small things: copying, menus that close, and the run page's way from a tensor in the map to its own chart.

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  const text = button.dataset.copy === "address" ? location.href : (source.value ?? source.textContent).trim();
  const label = button.querySelector("[data-label]");
  const before = label.textContent;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
  } catch {
    // Without https the clipboard is closed to scripts: select it, so that one key does it.
    if (source) getSelection().selectAllChildren(source);
    label.textContent = source ? "Press Ctrl+C" : "Copy the address above";
  }
  setTimeout(() => { label.textContent = before; }, 2500);
});

const closable = "details.menu[open], details.help[open]";
document.addEventListener("click", (event) => {
  for (const details of document.querySelectorAll(closable)) {
    if (!details.contains(event.target)) details.open = false;
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const details of document.querySelectorAll(closable)) {
    details.open = false;
    details.querySelector("summary").focus();
  }
});
// A help text near the right edge opens towards the left.
document.addEventListener("toggle", (event) => {
  const text = event.target.open && event.target.matches?.("details.help") && event.target.querySelector(".help__text");
  if (!text) return;
  text.style.left = "";
  const over = text.getBoundingClientRect().right - (document.documentElement.clientWidth - 10);
  if (over > 0) text.style.left = `${-8 - over}px`;
}, true);

// Where there is no room beside it, the choice of runs must not stand before the verdict.
if (matchMedia("(max-width: 1100px)").matches) document.querySelector("details.chooser")?.removeAttribute("open");

// The address names what is shown, also where nobody chose it: the link is worth sharing at once.
const compared = document.getElementById("compared");
if (compared && !location.search) history.replaceState(history.state, "", compared.dataset.query);

const tensorField = document.getElementById("tensor-field");
const choose = (name) => {
  tensorField.value = name;
  // Whoever looks at a tensor may want to change its layer.
  const layer = document.getElementById("layer-field");
  if (layer) layer.value = name.slice(0, name.lastIndexOf("."));
  tensorField.dispatchEvent(new Event("change", { bubbles: true }));
  document.getElementById("tensor-panel").scrollIntoView({
    block: "nearest",
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
  });
};
if (tensorField) {
  document.addEventListener("fp8:point", (event) => {
    const name = event.target.id === "heatmap" && event.detail.meta.names[event.detail.point.pointIndex[0]];
    if (name) choose(name);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-tensor]");
    if (button) choose(button.dataset.tensor);
  });
}

// Signed out meanwhile: show the sign-in page as a page, not as a part of this one.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (new URL(event.detail.xhr.responseURL).pathname.startsWith("/signin/")) {
    event.detail.shouldSwap = false;
    location.reload();
  }
});
