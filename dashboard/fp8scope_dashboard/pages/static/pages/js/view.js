// Keeps the state of a page's charts in its address, so that a link shows the same view, and back and forward work.
//
// A field of <form data-controls="loss"> is the parameter loss.FIELD, or only loss if the field has that name. A range
// has the name of its axis. Choices add an entry to the history; typing and zooming replace the current one.

const query = () => new URLSearchParams(location.search);
// The server may have rendered fields from these, so that their default is not what the page shows without them.
const given = new Set(query().keys());
// What other scripts reported, for addresses that another script writes.
const reported = new Map();
let isRestoring = false;

const keyOf = (form, name) => {
  const id = form.dataset.controls.split(" ")[0];
  return name === id ? id : `${id}.${name}`;
};

const valuesOf = (form) => {
  const values = new Map(new FormData(form));
  values.delete("csrfmiddlewaretoken");
  return values;
};

const defaultsOf = (form) => {
  const copy = form.cloneNode(true);
  copy.reset();
  return valuesOf(copy);
};

const write = (url, push) => {
  if (url.href === location.href) return;
  if (push) history.pushState({ fp8: true }, "", url); else history.replaceState(history.state, "", url);
};

const addTo = (url, form) => {
  const values = valuesOf(form);
  const defaults = defaultsOf(form);
  for (const name of new Set([...values.keys(), ...defaults.keys()])) {
    const key = keyOf(form, name);
    const value = values.get(name) ?? "";
    if (value === (defaults.get(name) ?? "") && !given.has(key)) url.searchParams.delete(key);
    else url.searchParams.set(key, value);
  }
};

const addReported = (url, name) => {
  const value = reported.get(name);
  if (value === null) url.searchParams.delete(name); else url.searchParams.set(name, value);
};

const restoreField = (field, value) => {
  if (field.type === "checkbox" || field.type === "radio") {
    if (field.checked === (field.value === value)) return false;
    field.checked = field.value === value;
    return field.type === "checkbox" || field.checked;
  }
  const isPossible = field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value);
  if (!isPossible || field.value === value) return false;
  field.value = value;
  return true;
};

// Returns the fields that changed.
const restore = (form) => {
  const parameters = query();
  const defaults = defaultsOf(form);
  const fields = [...form.elements].filter((field) => field.name && !["hidden", "submit", "button"].includes(field.type));
  return fields.filter((field) => restoreField(field, parameters.get(keyOf(form, field.name)) ?? defaults.get(field.name) ?? ""));
};

const seen = new WeakSet();
const restoreNew = () => {
  for (const form of document.querySelectorAll("form[data-controls]")) {
    if (!seen.has(form)) restore(form);
    seen.add(form);
  }
};

const record = (event, push) => {
  const form = event.target.closest?.("form[data-controls]");
  if (!form || isRestoring) return;
  const url = new URL(location.href);
  addTo(url, form);
  write(url, push);
};

const report = (name, value) => {
  reported.set(name, value);
  const url = new URL(location.href);
  addReported(url, name);
  write(url, false);
};

document.addEventListener("change", (event) => record(event, true));
document.addEventListener("input", (event) => { if (event.target.type === "search") record(event, false); });
document.addEventListener("fp8:view", ({ detail }) => report(detail.name, detail.value));
document.addEventListener("fp8:range", ({ detail: { axis, range } }) => {
  report(axis, range && range.map((value) => Number(value.toPrecision(8))).join(".."));
});
addEventListener("popstate", (event) => {
  // htmx replaces the page itself.
  if (event.state?.htmx) return;
  isRestoring = true;
  for (const name of reported.keys()) reported.set(name, query().get(name));
  for (const form of document.querySelectorAll("form[data-controls]")) {
    for (const field of restore(form)) field.dispatchEvent(new Event("change", { bubbles: true }));
  }
  isRestoring = false;
  document.dispatchEvent(new CustomEvent("fp8:restored"));
});
// htmx wrote an address without the state of the charts.
document.addEventListener("htmx:pushedIntoHistory", () => {
  const url = new URL(location.href);
  document.querySelectorAll("form[data-controls]").forEach((form) => addTo(url, form));
  for (const name of reported.keys()) addReported(url, name);
  write(url, false);
});
document.addEventListener("htmx:afterSettle", restoreNew);
restoreNew();
