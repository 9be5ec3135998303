// Marks of runs' charts: a click on a mark opens its alert or its note, a click on a step shows what is there and adds a
// note. With the keyboard, Enter does the same at the step that the arrow keys have reached. Also the form of a note, in a
// dialog. Without this script the form is a page, and the tab of notes and the alerts have what the marks lead to.

// A press that moves further, or takes longer, is a drag. Pixels and milliseconds.
const STILL = 5;
const LONG = 700;
// A second press so soon after the first is a double click, which shows all steps.
const DOUBLE = 300;
// How far from a mark a click still means it; a finger is less exact.
const NEAR = { mouse: 8, pen: 10, touch: 18 };
const MAX_LISTED = 6;

const plain = (html) => new DOMParser().parseFromString(html.replaceAll("<br>", "\n"), "text/html").body.textContent;
const plotOf = (figure) => figure.querySelector(".figure__plot");
const layoutOf = (figure) => (figure.dataset.state === "ready" ? plotOf(figure)?._fullLayout : null);

// The marks of a chart with their places in pixels of the figure.
const marksOf = (figure) => {
  const layout = layoutOf(figure);
  const traces = (layout && plotOf(figure)._fullData) || [];
  return traces.filter((trace) => trace.meta?.addresses && trace.visible === true).flatMap((trace) => {
    const axis = layout[`yaxis${(trace.yaxis ?? "y").slice(1)}`];
    return Array.from(trace.x, (x, index) => ({
      text: plain(trace.text[index]),
      address: trace.meta.addresses[index],
      left: layout.xaxis._offset + layout.xaxis.d2p(x),
      top: axis._offset + axis.d2p(trace.y[index]),
    }));
  }).filter(({ left }) => left >= layout.xaxis._offset - 1 && left <= layout.xaxis._offset + layout.xaxis._length + 1);
};

// The step at a place of a figure's axis, in its units (milliseconds of dates). Over tokens or time it is that of the next
// point of the line that has the steps of its points. Null in a chart that cannot tell.
const stepOf = (figure, at) => {
  if (layoutOf(figure).xaxis.title?.text === "step") return Math.max(0, Math.round(at));
  const line = plotOf(figure)._fullData.find((trace) => trace.meta?.steps);
  if (!line?.x?.length) return null;
  let next = 0;
  for (let index = 1; index < line.x.length; index += 1) {
    if (Math.abs(line.x[index] - at) < Math.abs(line.x[next] - at)) next = index;
  }
  return line.customdata[next];
};

// The place on the axis of the values that are shown at a place of the figure, else of the place itself. Null outside of
// the chart.
const axisAt = (figure, { left, top }) => {
  const layout = layoutOf(figure);
  const axis = layout?.xaxis;
  if (!axis) return null;
  const { t, h } = layout._size;
  if (left < axis._offset - 2 || left > axis._offset + axis._length + 2 || top < t || top > t + h) return null;
  const shown = plotOf(figure)._hoverdata?.[0]?.x;
  const isNear = shown !== undefined && Math.abs(axis._offset + axis.d2p(shown) - left) < 24;
  return isNear ? axis.d2l(shown) : axis.p2l(left - axis._offset);
};

const stepAt = (figure, place) => {
  const at = axisAt(figure, place);
  return at === null ? null : stepOf(figure, at);
};

const placeIn = (figure, event) => {
  const box = plotOf(figure).getBoundingClientRect();
  return { left: event.clientX - box.left, top: event.clientY - box.top };
};

// The marks whose symbol is at a place.
const hit = (figure, place, near) => marksOf(figure).filter(
  (mark) => mark.address && Math.abs(mark.left - place.left) <= near && Math.abs(mark.top - place.top) <= near,
);

// The callout

let callout = null;
let opener = null;

const element = (tag, properties, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

const closeCallout = ({ focus = false } = {}) => {
  const at = callout?.dataset.at;
  callout?.remove();
  callout = null;
  if (!focus || !opener) return;
  opener.focus();
  // The chart forgets the place that was reached when it loses the focus.
  if (at) opener.dataset.at = at;
};

const formAddress = (figure, step) => {
  const link = figure.querySelector("a[data-note-form]");
  if (!link) return null;
  const url = new URL(link.href);
  url.searchParams.set("step", step);
  return url.href;
};

const openCallout = (figure, step, place, { focus = false, near = NEAR.mouse } = {}) => {
  closeCallout();
  const marks = marksOf(figure).filter((mark) => Math.abs(mark.left - place.left) <= near);
  const address = formAddress(figure, step);
  if (!marks.length && !address) return;
  const title = `Step ${step.toLocaleString("en")}`;
  const close = element("button", { type: "button", className: "button button--bare button--small", ariaLabel: "Close" }, "×");
  close.addEventListener("click", () => closeCallout({ focus: true }));
  callout = element("div", { className: "figure__callout", role: "group", ariaLabel: title },
    element("div", { className: "figure__callout-head" }, element("strong", {}, title), close));
  callout.dataset.at = layoutOf(figure).xaxis.p2l(place.left - layoutOf(figure).xaxis._offset);
  const entries = marks.slice(0, MAX_LISTED).map((mark) => {
    const text = mark.text.split("\n")[0];
    return element("li", {}, mark.address ? element("a", { href: mark.address }, text) : text);
  });
  if (marks.length > MAX_LISTED) entries.push(element("li", {}, `and ${marks.length - MAX_LISTED} more`));
  if (entries.length) callout.append(element("ul", {}, ...entries));
  if (address) {
    const link = element("a", { className: "button button--small", href: address }, "Add a note here");
    link.dataset.noteForm = "";
    callout.append(link);
  }
  figure.append(callout);
  opener = plotOf(figure);
  const left = Math.min(Math.max(6, place.left + 10), figure.clientWidth - callout.offsetWidth - 6);
  const top = Math.min(Math.max(4, place.top - 20), Math.max(4, figure.clientHeight - callout.offsetHeight - 4));
  Object.assign(callout.style, { left: `${left}px`, top: `${top}px` });
  if (focus) callout.querySelector("a").focus();
};

// Clicks. Plotly covers the page while a button is pressed, so the places are compared, not the elements.

let down = null;
let pressedAt = -Infinity;
let opening = null;

document.addEventListener("pointerdown", (event) => {
  if (callout && !callout.contains(event.target)) closeCallout();
  clearTimeout(opening);
  const isSecond = event.timeStamp - pressedAt < DOUBLE;
  pressedAt = event.timeStamp;
  const figure = event.target.closest?.(".figure__plot")?.closest(".figure[data-marks]");
  const isEntry = event.target.closest?.(".legend, .figure__callout");
  down = figure && !isEntry && !isSecond && !event.button && event.isPrimary
    ? { figure, x: event.clientX, y: event.clientY, at: event.timeStamp } : null;
}, true);
document.addEventListener("pointercancel", () => { down = null; }, true);
document.addEventListener("pointerup", (event) => {
  if (!down) return;
  const { figure, x, y, at } = down;
  down = null;
  const isClick = Math.hypot(event.clientX - x, event.clientY - y) <= STILL && event.timeStamp - at < LONG;
  if (!isClick || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = placeIn(figure, event);
  const near = NEAR[event.pointerType] ?? NEAR.mouse;
  const step = stepAt(figure, place);
  const marks = hit(figure, place, near);
  if (marks.length === 1) location.assign(marks[0].address);
  else if (step !== null) opening = setTimeout(() => openCallout(figure, step, place, { near }), DOUBLE);
}, true);

document.addEventListener("pointermove", (event) => {
  if (event.pointerType !== "mouse" || event.buttons) return;
  const figure = event.target.closest?.(".figure__plot")?.closest(".figure[data-marks]");
  figure?.classList.toggle("figure--over-mark", hit(figure, placeIn(figure, event), NEAR.mouse).length > 0);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && callout) {
    closeCallout({ focus: true });
    return;
  }
  const plot = event.target;
  const figure = plot.matches?.(".figure__plot") && plot.closest(".figure[data-marks]");
  if (event.key !== "Enter" || !figure || event.ctrlKey || event.metaKey || event.altKey) return;
  const axis = layoutOf(figure)?.xaxis;
  if (!axis) return;
  // figure.js keeps the place that the arrow keys have reached; without one it is the middle.
  const reached = Number(plot.dataset.at || NaN);
  const at = Number.isFinite(reached) ? reached : (axis.r2l(axis.range[0]) + axis.r2l(axis.range[1])) / 2;
  const step = stepOf(figure, at);
  if (step === null) return;
  event.preventDefault();
  const place = { left: axis._offset + axis.l2p(at), top: layoutOf(figure)._size.t + 30 };
  openCallout(figure, step, place, { focus: true });
});

// A chart that is drawn again may have other marks elsewhere.
document.addEventListener("fp8:range", () => {
  clearTimeout(opening);
  closeCallout();
});

// The form of a note

let formOpener = null;
const dialog = () => {
  let made = document.getElementById("note-dialog");
  if (!made) {
    made = element("dialog", { className: "dialog", id: "note-dialog", ariaLabel: "Note at a step" });
    document.body.append(made);
    window.htmx.process(made);
  }
  return made;
};

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-note-form]");
  if (!link || !window.htmx || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  formOpener = callout?.contains(link) ? opener : link;
  closeCallout();
  const menu = link.closest("details.menu");
  if (menu) {
    menu.open = false;
    formOpener = menu.querySelector("summary");
  }
  try {
    await window.htmx.ajax("GET", link.href, { source: dialog(), target: dialog(), swap: "innerHTML" });
  } catch {
    location.assign(link.href);
    return;
  }
  if (!dialog().open) dialog().showModal();
  dialog().querySelector(dialog().querySelector("[name=step]")?.value ? "[name=text]" : "[name=step]")?.focus();
});
const closeForm = () => {
  dialog().close();
  formOpener?.focus();
};
document.addEventListener("click", (event) => {
  const shown = document.getElementById("note-dialog");
  if (!shown?.open || (event.target !== shown && !event.target.closest("[data-note-close]"))) return;
  event.preventDefault();
  closeForm();
});
// The server's event draws the mark for everybody; here at once.
document.addEventListener("fp8:noted", ({ detail }) => {
  closeForm();
  document.dispatchEvent(new CustomEvent("fp8:change", { detail: { kinds: new Set(["note"]), all: false } }));
  const figure = formOpener?.closest(".figure");
  if (!figure) return;
  // Not the chart's own line, which is empty once it is drawn again. Readers announce a text that comes later.
  const line = element("p", { className: "figure__note", role: "status" });
  figure.append(line);
  setTimeout(() => { line.textContent = detail.said; }, 50);
  setTimeout(() => line.remove(), 6000);
});
