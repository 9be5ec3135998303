// The charts of a run that people arrange: dragging and sizing with the mouse or the arrow keys, and the form of a
// panel in a dialog. Without this script, the menu of a panel moves it, and its form is a page.

const charts = () => document.getElementById("charts");
const say = (text) => {
  const line = charts()?.querySelector("[data-charts-said]");
  if (line) line.textContent = text;
};

// Send a change with the form of a panel, which has the view and the panel.
const change = (panel, values) => {
  const form = panel.querySelector("form.panel__head");
  const fields = Object.fromEntries(new FormData(form));
  const address = form.getAttribute("action");
  return window.htmx.ajax("POST", address, { source: form, target: "#charts", swap: "outerHTML", values: { ...fields, ...values } });
};

const nameOf = (panel) => panel.getAttribute("aria-label");
const panelsBeside = (panel) => [...panel.parentElement.querySelectorAll(":scope > [data-panel]")];

// Order

const move = (panel, to) => {
  const beside = panelsBeside(panel);
  if (to < 0 || to >= beside.length || to === beside.indexOf(panel)) return;
  say(`${nameOf(panel)} is now number ${to + 1} of ${beside.length}.`);
  change(panel, { action: "move", to: String(to) });
};

// The panel of the same section at a point of the window.
const panelAt = (panel, { clientX, clientY }) => {
  const target = document.elementFromPoint(clientX, clientY)?.closest("[data-panel]");
  return target && target !== panel && target.parentElement === panel.parentElement ? target : null;
};

const drag = (grip, down) => {
  const panel = grip.closest("[data-panel]");
  let target = null;
  const follow = (event) => {
    target?.classList.remove("panel--target");
    target = panelAt(panel, event);
    target?.classList.add("panel--target");
  };
  const stop = (event) => {
    for (const [kind, listener] of listeners) grip.removeEventListener(kind, listener);
    panel.classList.remove("panel--moved");
    target?.classList.remove("panel--target");
    if (event.type === "pointerup" && target) move(panel, panelsBeside(panel).indexOf(target));
  };
  const listeners = [["pointermove", follow], ["pointerup", stop], ["pointercancel", stop]];
  panel.classList.add("panel--moved");
  grip.setPointerCapture(down.pointerId);
  for (const [kind, listener] of listeners) grip.addEventListener(kind, listener);
};

document.addEventListener("pointerdown", (event) => {
  const grip = event.target.closest?.("[data-grip]");
  if (!grip || event.button) return;
  event.preventDefault();
  grip.focus();
  drag(grip, event);
});

// Size

const HEIGHTS = ["small", "medium", "large"];
const STEP = 90;

const resize = (panel, columns, rows) => {
  const before = [Number(panel.dataset.width), HEIGHTS.indexOf(panel.dataset.height)];
  const after = [Math.max(1, Math.min(3, before[0] + columns)), Math.max(0, Math.min(2, before[1] + rows))];
  if (`${before}` === `${after}`) return;
  say(`${nameOf(panel)}: ${after[0]} of 3 columns, ${["low", "medium", "high"][after[1]]}.`);
  change(panel, { action: "size", width: String(after[0]), height: HEIGHTS[after[1]] });
};

document.addEventListener("pointerdown", (event) => {
  const corner = event.target.closest?.("[data-corner]");
  if (!corner || event.button) return;
  event.preventDefault();
  corner.focus();
  corner.setPointerCapture(event.pointerId);
  const panel = corner.closest("[data-panel]");
  const { width } = panel.getBoundingClientRect();
  const column = width / Number(panel.dataset.width);
  const begin = [event.clientX, event.clientY];
  const stop = (end) => {
    corner.removeEventListener("pointerup", stop);
    corner.removeEventListener("pointercancel", stop);
    if (end.type === "pointercancel") return;
    resize(panel, Math.round((end.clientX - begin[0]) / column), Math.round((end.clientY - begin[1]) / STEP));
  };
  corner.addEventListener("pointerup", stop);
  corner.addEventListener("pointercancel", stop);
});

document.addEventListener("keydown", (event) => {
  const handle = event.target.closest?.("[data-grip], [data-corner]");
  if (!handle || event.ctrlKey || event.metaKey || event.altKey) return;
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
  const down = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
  if (!across && !down) return;
  event.preventDefault();
  const panel = handle.closest("[data-panel]");
  if ("grip" in handle.dataset) move(panel, panelsBeside(panel).indexOf(panel) + (across || down));
  else resize(panel, across, down);
});

// The form

const dialog = () => document.getElementById("panel-dialog");
let opener = null;

document.addEventListener("click", async (event) => {
  const link = event.target.closest("[data-panel-form]");
  if (!link || !dialog() || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  opener = link;
  try {
    await window.htmx.ajax("GET", link.getAttribute("href"), { source: "#panel-dialog", target: "#panel-dialog", swap: "innerHTML" });
  } catch {
    location.assign(link.href);
    return;
  }
  if (!dialog().open) dialog().showModal();
});
document.addEventListener("click", (event) => {
  if (!dialog()?.open) return;
  const isBackdrop = event.target === dialog();
  if (!isBackdrop && !event.target.closest("[data-panel-close]")) return;
  event.preventDefault();
  dialog().close();
  opener?.focus();
});

document.addEventListener("input", (event) => {
  if (!event.target.matches?.("[data-find-metric]")) return;
  const text = event.target.value.trim().toLowerCase();
  for (const box of event.target.closest("fieldset").querySelectorAll(".check")) {
    box.hidden = !box.textContent.toLowerCase().includes(text);
  }
});
