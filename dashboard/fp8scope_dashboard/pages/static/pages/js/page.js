// Copy buttons and closing menus.

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
