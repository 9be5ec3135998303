// The list of runs: selection that survives refreshes and paging, and keyboard shortcuts.

const OFF = "fp8scope-shortcuts-off";
const selected = new Map();
let everything = false;
let current = null;
let anchor = null;

const list = () => document.getElementById("runs");
const bar = () => document.getElementById("bulk");
const boxes = () => [...document.querySelectorAll('#runs [type=checkbox][name="runs"]')];
const links = () => [...document.querySelectorAll("#runs .runs__name, #runs .group__toggle")];

const count = () => (everything ? Number(bar().elements.matching.value) : selected.size);

const showSelection = () => {
  const form = bar();
  if (!form) return;
  for (const box of boxes()) box.checked = everything || selected.has(box.value);
  const shown = new Set(boxes().map((box) => box.value));
  const elsewhere = [...selected.keys()].filter((id) => !shown.has(id));
  form.toggleAttribute("data-held", everything || selected.size > 0);
  form.elements.all.value = everything ? "1" : "0";
  // Runs of other pages of the list are selected as well: they are fields of the form.
  form.querySelector("[data-holder]").replaceChildren(...(everything ? [] : elsewhere).map((id) => {
    const field = document.createElement("input");
    field.type = "hidden";
    field.name = "runs";
    field.value = id;
    return field;
  }));
  const text = everything ? `All ${count().toLocaleString("en").replaceAll(",", "\u202f")} that match` : `${selected.size} selected`;
  const label = form.querySelector("[data-selected]");
  const whole = elsewhere.length && !everything ? `${text}, ${elsewhere.length} not shown here` : text;
  if (label.textContent !== whole) label.textContent = whole;
  const more = form.querySelector("[data-select-all]");
  if (more) more.hidden = everything || !selected.size;
  const page = document.querySelector("[data-pick-page]");
  if (page) {
    page.checked = shown.size > 0 && [...shown].every((id) => everything || selected.has(id));
    page.indeterminate = !page.checked && [...shown].some((id) => selected.has(id));
  }
  for (const group of document.querySelectorAll("[data-pick-group]")) {
    const own = [...group.closest("tbody").querySelectorAll('[type=checkbox][name="runs"]')];
    group.checked = own.every((box) => box.checked);
    group.indeterminate = !group.checked && own.some((box) => box.checked);
  }
};

const set = (box, on) => {
  if (on) selected.set(box.value, true); else selected.delete(box.value);
};

const clear = () => {
  selected.clear();
  everything = false;
  anchor = null;
  showSelection();
};

// Select or clear a box; with `extend`, all boxes from the last one that was changed.
const pick = (box, on, extend) => {
  everything = false;
  const all = boxes();
  const from = extend ? all.findIndex((each) => each.value === anchor) : -1;
  const to = all.indexOf(box);
  const range = from < 0 ? [box] : all.slice(Math.min(from, to), Math.max(from, to) + 1);
  for (const each of range) set(each, on);
  anchor = box.value;
  showSelection();
};

document.addEventListener("click", (event) => {
  const box = event.target.closest?.('#runs [type=checkbox][name="runs"]');
  if (box) pick(box, box.checked, event.shiftKey);
  else if (event.target.matches?.("[data-pick-page], [data-pick-group]")) {
    const scope = event.target.matches("[data-pick-page]") ? list() : event.target.closest("tbody");
    everything = false;
    for (const each of scope.querySelectorAll('[type=checkbox][name="runs"]')) set(each, event.target.checked);
    showSelection();
  } else if (event.target.closest?.("[data-select-all]")) {
    everything = true;
    showSelection();
  } else if (event.target.closest?.("[data-clear]")) {
    event.preventDefault();
    clear();
  } else if (event.target.closest?.("[data-shortcuts]")) document.getElementById("shortcuts").showModal();
});

// The last row that was reached with the keyboard.
const reach = (link) => {
  current = link.id;
  link.focus();
  const row = link.closest("tr");
  row.scrollIntoView({ block: "nearest" });
};
const showCurrent = () => {
  for (const row of document.querySelectorAll("#runs tr.is-current")) row.classList.remove("is-current");
  const link = document.activeElement;
  if (link?.matches?.("#runs .runs__name, #runs .group__toggle")) {
    current = link.id;
    link.closest("tr").classList.add("is-current");
  }
};
document.addEventListener("focusin", showCurrent);
document.addEventListener("focusout", showCurrent);

const step = (by) => {
  const all = links();
  if (!all.length) return;
  const at = all.findIndex((link) => link.id === current);
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1);
  reach(all[next]);
};

const isOn = () => { try { return localStorage.getItem(OFF) !== "1"; } catch { return true; } };
const isTyping = (target) => target.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable]");

const KEYS = {
  "/": () => document.getElementById("find-text")?.focus(),
  j: () => step(1),
  k: () => step(-1),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  x: (event) => {
    const box = document.getElementById(current ?? "")?.closest("tr")?.querySelector('[type=checkbox][name="runs"], [data-pick-group]');
    if (!box) return;
    if (box.name === "runs") pick(box, !(everything || selected.has(box.value)), event.shiftKey);
    else box.click();
  },
  c: () => { if (count()) bar().requestSubmit(bar().querySelector("[formaction]")); },
  "?": () => document.getElementById("shortcuts").showModal(),
};
KEYS.X = KEYS.x;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const form = bar();
  // Enter in the field of the tag adds it; by default it would press the first button.
  if (event.key === "Enter" && event.target.matches?.('#bulk [name="tag"]')) {
    event.preventDefault();
    form.requestSubmit(form.querySelector('[name="action"][value="tag"]'));
    return;
  }
  // Until it is drawn again, the page leaves the focus in a dialog that has just been closed.
  if (isTyping(event.target) || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && !document.querySelector("details.menu[open], details.help[open]")) { clear(); return; }
  const isArrow = event.key.startsWith("Arrow");
  // Arrow keys scroll the page unless a row has the focus.
  if (isArrow ? !document.activeElement?.closest?.("#runs tr") : !isOn()) return;
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act(event);
});

const onToggle = document.querySelector("[data-shortcuts-on]");
if (onToggle) {
  onToggle.checked = isOn();
  onToggle.addEventListener("change", () => {
    try { if (onToggle.checked) localStorage.removeItem(OFF); else localStorage.setItem(OFF, "1"); } catch { /* this page only */ }
  });
  document.querySelector("[data-shortcuts]")?.removeAttribute("hidden");
}

// A view is saved with the order and columns that the list has now.
document.addEventListener("submit", (event) => {
  if (event.target.matches("[data-save-view]")) event.target.elements.query.value = list().dataset.query;
});

document.addEventListener("htmx:afterSettle", () => {
  const field = document.getElementById("find-text");
  const runs = list();
  // A facet has changed the search.
  if (field && runs && document.activeElement !== field) field.value = runs.dataset.search;
  if (current) {
    const link = document.getElementById(current);
    if (link && document.activeElement === document.body) link.focus();
  }
  showSelection();
});
// Another search selects other runs: "all that match" would mean them.
document.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.target?.id === "runs" && event.detail.path !== list()?.getAttribute("hx-get")) everything = false;
});
showSelection();
