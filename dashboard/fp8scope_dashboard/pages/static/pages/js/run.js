// The page of a run: its tabs without a reload, the range of steps, and times in the browser's time zone.
//
// The range is that of the axis "steps", which figure.js and view.js keep; this script only asks for another
// one (fp8:range) and shows the present one in the form and in the strip.

const AXIS = "steps";
const page = document.querySelector("#run-tab");

// Tabs

const tabOf = (address) => new URLSearchParams(address.search).get("tab") ?? "overview";

// The address of a tab with what else the page's address has now.
const tabAddress = (name) => {
  const url = new URL(location.href);
  if (name === "overview") url.searchParams.delete("tab");
  else url.searchParams.set("tab", name);
  url.hash = "";
  return url;
};

const current = () => document.getElementById("run-tab");

// The list of tabs that gets the focus once a tab is shown: the link that had it is replaced. Empty for none.
let movesFocus = "";

const showTab = async (url, { focus = "" } = {}) => {
  current().setAttribute("aria-busy", "true");
  movesFocus = focus;
  try {
    // Requests of the same source wait for each other, and this one must not wait for parts of the page.
    await window.htmx.ajax("GET", `${url.pathname}${url.search}`, { source: "#main", target: "#run-tab", swap: "outerHTML" });
  } catch {
    // No connection: the browser says so, and can try again.
    location.assign(url);
  }
};

// The request's promise is fulfilled at once if the request has to wait, so the focus follows the event.
document.addEventListener("htmx:afterSwap", (event) => {
  if (!movesFocus || event.detail.target?.id !== "run-tab") return;
  const list = movesFocus;
  movesFocus = "";
  // Somebody who has gone on to another part of the page stays there.
  if (document.activeElement === document.body) current().querySelector(`${list} [aria-current]`)?.focus();
});

const openTab = (name, options) => {
  const url = tabAddress(name);
  if (name !== current().dataset.tab) history.pushState({ fp8: true }, "", url);
  showTab(url, options);
};

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-tab-link]");
  if (!page || !link || link.dataset.tabLink === "data") return;
  if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || !window.htmx) return;
  event.preventDefault();
  openTab(link.dataset.tabLink, { focus: link.closest("[data-parts]") ? "[data-parts]" : "[data-tabs]" });
});

// Arrow keys move between the tabs; Enter opens one, as any link.
document.addEventListener("keydown", (event) => {
  const link = event.target.closest?.("[data-tab-link]");
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
  if (!link || move === undefined) return;
  const links = [...link.parentElement.querySelectorAll("[data-tab-link]")];
  const next = Math.max(0, Math.min(links.length - 1, links.indexOf(link) + move));
  links[next].focus();
  event.preventDefault();
});

// The page of the error says what is wrong.
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.target?.id === "run-tab") location.assign(event.detail.pathInfo.requestPath);
});

addEventListener("popstate", () => {
  if (page && tabOf(location) !== current().dataset.tab) showTab(new URL(location.href));
});

// Range of steps

const addressRange = () => {
  const parts = (new URLSearchParams(location.search).get(AXIS) ?? "").split("..");
  const range = parts.map((part) => (part.trim() ? Number(part) : NaN));
  return range.length === 2 && range.every(Number.isFinite) ? range : null;
};

const showRange = (range) => {
  for (const form of document.querySelectorAll("[data-range-form]")) {
    if (form.contains(document.activeElement) && document.activeElement.matches("input")) continue;
    form.elements.first.value = range ? Math.max(0, Math.ceil(range[0])) : "";
    form.elements.last.value = range ? Math.floor(range[1]) : "";
  }
  const text = range ? range.join(" ") : "";
  for (const link of document.querySelectorAll(".onset [data-range]")) {
    if (link.dataset.range === text) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
};

// A range that somebody chose is an entry of the history, unlike those of zooming on and on.
const ask = (range) => {
  const url = new URL(location.href);
  if (range) url.searchParams.set(AXIS, range.join(".."));
  else url.searchParams.delete(AXIS);
  if (url.href !== location.href) history.pushState({ fp8: true }, "", url);
  document.dispatchEvent(new CustomEvent("fp8:range", { detail: { axis: AXIS, range } }));
};

document.addEventListener("fp8:range", (event) => {
  if (event.detail.axis === AXIS) showRange(event.detail.range);
});

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-range]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  const range = link.dataset.range.split(" ").filter(Boolean).map(Number);
  ask(range.length === 2 ? range : null);
  const panels = document.getElementById("panels");
  if (link.closest(".onset") && panels) {
    panels.closest("section").scrollIntoView({
      block: "nearest",
      behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
    });
  }
});

// An empty field is the begin or the end of the run.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.matches("[data-range-form]")) return;
  event.preventDefault();
  const [first, last] = ["first", "last"].map((name) => form.elements[name].value.trim());
  const end = Number(form.dataset.lastStep) || 0;
  const range = first || last ? [Number(first || 0), last ? Number(last) : end] : null;
  const problem = range && range[0] >= range[1] ? "The last step must be above the first." : "";
  form.elements.last.setCustomValidity(problem);
  if (problem) form.elements.last.reportValidity();
  else ask(range);
});
document.addEventListener("input", (event) => {
  if (event.target.closest("[data-range-form]")) event.target.form.elements.last.setCustomValidity("");
});

// Times

const FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const showMoments = () => {
  for (const time of document.querySelectorAll("time[data-moment]:not([data-shown])")) {
    const text = FORMAT.format(new Date(time.dateTime));
    time.title = `${text} (${time.title})`;
    if (time.dataset.moment === "full") time.textContent = text;
    time.dataset.shown = "";
  }
};

// On a narrow screen the tabs scroll sideways.
const showCurrentTab = () => {
  const link = document.querySelector("[data-tabs] [aria-current]");
  const list = link?.parentElement;
  if (list) list.scrollLeft = Math.max(0, link.offsetLeft + link.offsetWidth / 2 - list.clientWidth / 2);
};

const refresh = () => { showMoments(); showRange(addressRange()); };
document.addEventListener("htmx:afterSettle", refresh);
addEventListener("popstate", refresh);
document.addEventListener("htmx:afterSettle", (event) => { if (event.target.id === "run-tab") showCurrentTab(); });
refresh();
showCurrentTab();

// A tensor that is chosen where no panel for it is shown: the tab of tensors has one.
if (page && location.hash && !document.querySelector(location.hash)) {
  const name = { "#ranks": "ranks", "#efficiency": "efficiency" }[location.hash];
  if (name && current().dataset.tab !== name) openTab(name);
}
