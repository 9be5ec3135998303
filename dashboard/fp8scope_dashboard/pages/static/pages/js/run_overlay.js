// The chart of chosen runs above the list: each run has an eye, which shows its curve.
//
// Until somebody has chosen, the first runs of the list are shown. The choice lasts as long as the tab, for each project.

const AUTOMATIC = 8;
const MOST = 30;
const OPEN = "fp8scope-run-chart";

const section = document.querySelector("[data-overlay]");
const toggle = document.querySelector("[data-overlay-toggle]");
const key = `${OPEN}:${section?.dataset.overlay}`;

const read = (storage, name) => { try { return storage.getItem(name); } catch { return null; } };
const write = (storage, name, value) => { try { if (value === null) storage.removeItem(name); else storage.setItem(name, value); } catch { /* this page only */ } };

let chosen = read(sessionStorage, key)?.split(",").filter(Boolean) ?? null;
const eyes = () => [...document.querySelectorAll("#runs [data-eye]")];
const first = () => eyes().slice(0, AUTOMATIC).map((eye) => eye.dataset.eye);
const shown = () => chosen ?? first();

const show = ({ reload = false } = {}) => {
  const ids = shown();
  for (const eye of eyes()) {
    eye.hidden = false;
    eye.setAttribute("aria-pressed", String(!section.hidden && ids.includes(eye.dataset.eye)));
  }
  const field = section.querySelector("[name=runs]");
  const value = ids.join(",");
  section.querySelector("[data-overlay-count]").textContent = `${ids.length} run${ids.length === 1 ? "" : "s"}`;
  if (field.value === value && !reload) return;
  field.value = value;
  if (!section.hidden) field.dispatchEvent(new Event("change", { bubbles: true }));
};

const choose = (ids) => {
  chosen = ids;
  write(sessionStorage, key, ids === null ? null : ids.join(","));
  show();
};

const open = (isOpen) => {
  section.hidden = !isOpen;
  toggle.setAttribute("aria-expanded", String(isOpen));
  write(localStorage, OPEN, isOpen ? "1" : null);
  show();
};

if (section && toggle) {
  toggle.hidden = false;
  toggle.addEventListener("click", () => open(section.hidden));
  section.querySelector("[data-overlay-none]").addEventListener("click", () => choose([]));
  section.querySelector("[data-overlay-automatic]").addEventListener("click", () => choose(null));
  document.addEventListener("click", (event) => {
    const eye = event.target.closest?.("[data-eye]");
    if (!eye) return;
    const id = eye.dataset.eye;
    if (section.hidden) {
      open(true);
      if (!shown().includes(id)) choose([...shown(), id].slice(-MOST));
      return;
    }
    choose(shown().includes(id) ? shown().filter((other) => other !== id) : [...shown(), id].slice(-MOST));
  });
  document.addEventListener("htmx:afterSettle", () => show());
  document.addEventListener("fp8:colours", () => show({ reload: true }));
  open(read(localStorage, OPEN) === "1");
}
