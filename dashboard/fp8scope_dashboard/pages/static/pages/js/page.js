// Copy buttons, closing menus, and media that cannot be loaded.

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  const chart = button.closest(".figure");
  const address = chart ? Object.assign(new URL(location.href), { hash: chart.id }).href : location.href;
  const text = button.dataset.copy === "address" ? address : (source.value ?? source.textContent).trim();
  const label = button.querySelector("[data-label]");
  const before = label.textContent;
  try {
    await navigator.clipboard.writeText(text);
    label.textContent = "Copied";
  } catch {
    // Without HTTPS scripts cannot use the clipboard: select the text for Ctrl+C.
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
// Keep a help text within the right edge of the window.
document.addEventListener("toggle", (event) => {
  const text = event.target.open && event.target.matches?.("details.help") && event.target.querySelector(".help__text");
  if (!text) return;
  text.style.left = "";
  if (getComputedStyle(text).position === "fixed") return;
  const over = text.getBoundingClientRect().right - (document.documentElement.clientWidth - 10);
  if (over > 0) text.style.left = `${-8 - over}px`;
}, true);

// On a narrow screen the list of runs is above the verdict, so it starts closed.
if (matchMedia("(max-width: 1100px)").matches) document.querySelector("details.chooser")?.removeAttribute("open");

// Put the default selection into the address, so that the link can be shared.
const compared = document.getElementById("compared");
if (compared && !location.search) history.replaceState(history.state, "", compared.dataset.query);

// After a sign-out, show the sign-in page instead of inserting it into this page.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (new URL(event.detail.xhr.responseURL).pathname.startsWith("/signin/")) {
    event.detail.shouldSwap = false;
    location.reload();
  }
});

// On a phone the navigation scrolls: show where the reader is.
document.querySelector('.nav [aria-current="page"]')?.scrollIntoView({ block: "nearest", inline: "nearest" });

// A picture that cannot be loaded leaves a sentence. Errors of pictures do not bubble.
document.addEventListener("error", (event) => {
  if (!event.target.matches?.("img.media__image")) return;
  const text = Object.assign(document.createElement("p"), {
    className: "media__missing small muted",
    textContent: "The picture cannot be loaded. Reload the page to try again.",
  });
  event.target.parentElement.replaceWith(text);
}, true);
// The media of the step before stay, which their own line says.
for (const kind of ["htmx:sendError", "htmx:responseError"]) {
  document.addEventListener(kind, (event) => {
    if (event.detail.target?.id !== "media-columns") return;
    const line = document.getElementById("media-step");
    const shown = line.dataset.shown ??= line.textContent;
    line.textContent = `This step cannot be loaded: the server does not answer. Shown is ${shown}.`;
  });
}
