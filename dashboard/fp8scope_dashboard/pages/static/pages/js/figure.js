// Charts: requests figures as JSON, draws them with plotly (drawing.js) and keeps them up to date. The template tag
// {% figure %} writes their markup. Attributes of a figure:
//
//   data-figure      its address; the fields of <form data-controls="its id"> become query parameters
//   data-on          the kinds of changes that refresh it
//   data-axis        figures with the same name share their range and their crosshair
//   data-zoom        zooming requests finer data
//   data-clickable   a click dispatches fp8:point on the element
//   data-marks       it has marks of runs; marks.js opens what they stand for, and adds notes
//
// Events on the document, which other scripts may dispatch too:
//
//   fp8:range {axis, range: [first, last] | null}   show this range in all figures of the axis; null is all of it
//   fp8:hover {axis, x: number | null, source}      move the crosshair in all figures of the axis but the source
//   fp8:view {name, value | null}                   part of the page's state changed (view.js keeps it in the address)

import { CONFIG, loadPlotly, shortenNames, turn } from "./drawing.js";

const COMPACT_BELOW = 620;
const NEAR = "250px";
// Milliseconds until a figure says that it is still loading, and until it gives up.
const SLOW_AFTER = 4000;
const TIMEOUT = 45000;
// Milliseconds for which the answer that came with the page is new enough; a tab may be opened but not shown. What changed
// meanwhile is announced when the page is connected.
const FRESH = 60000;

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

// A range is written as first..last.
const rangeOf = (text) => {
  const range = (text ?? "").split("..").map((part) => (part.trim() ? Number(part) : NaN));
  return range.length === 2 && range.every(Number.isFinite) ? range : null;
};
const addressRange = (name) => rangeOf(new URLSearchParams(location.search).get(name));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const publish = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

// A number, or the milliseconds of a time as plotly writes it: its axes of times know no time zones.
const numberOf = (value) => (Number.isNaN(Number(value)) ? Date.parse(`${String(value).replace(" ", "T")}Z`) : Number(value));

// The new range of an axis after an action of plotly: null is the whole range, undefined is no change.
const rangeAfter = (change, letter) => {
  for (const [key, value] of Object.entries(change)) {
    const axis = key.match(`^(${letter}axis\\d*)\\.`)?.[1];
    if (!axis) continue;
    if (change[`${axis}.autorange`]) return null;
    const range = Array.isArray(change[`${axis}.range`]) ? change[`${axis}.range`] : [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
    const ends = range.map(numberOf);
    if (key.includes(".range") && value !== undefined) return ends.every(Number.isFinite) ? ends : undefined;
  }
  return undefined;
};

const figures = new Map();
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) figures.get(entry.target)?.setNear(entry.isIntersecting);
}, { rootMargin: NEAR });

class Figure {
  constructor(element) {
    this.element = element;
    this.plot = element.querySelector(".figure__plot");
    this.state = element.querySelector(".figure__state");
    this.isNear = false;
    this.isDue = true;
    this.loadTime = 0;
    this.revision = 0;
    this.restore();
    this.compact = this.isCompact();
    this.takeAnswer();
    nearby.observe(element);
    new ResizeObserver(() => {
      if (this.isCompact() !== this.compact) this.refresh();
    }).observe(element);
    element.querySelector("[data-reset]")?.addEventListener("click", () => this.showAll());
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    this.plot.addEventListener("blur", () => this.point(null));
  }

  isCompact() { return this.element.clientWidth < COMPACT_BELOW; }

  setNear(isNear) {
    this.isNear = isNear;
    if (isNear && this.isDue) this.load();
  }

  // The page may bring the answer for the state that its address has.
  takeAnswer() {
    const script = this.element.querySelector("script[data-answer]");
    if (!script) return;
    script.remove();
    const { theme, query } = script.dataset;
    const isForThis = !this.compact && theme === (isDark() ? "dark" : "light") && location.search === (query && `?${query}`);
    if (isForThis) this.given = { text: script.textContent, until: performance.now() + FRESH };
  }

  // With `now`, what is under way is out of date.
  refresh({ now = false } = {}) {
    this.isDue = true;
    this.given = null;
    if (now && this.request) {
      this.isOutdated = true;
      this.request.abort();
    } else if (this.isNear) this.load();
  }

  controls() {
    const forms = [...document.querySelectorAll(`form[data-controls~="${this.element.id}"]`)];
    return new Map(forms.flatMap((form) => [...new FormData(form)]).filter(([name]) => name !== "csrfmiddlewaretoken"));
  }

  // The unit of the horizontal axis, which a control or the chart's own address chooses.
  unit() {
    return this.controls().get("x") ?? new URL(this.element.dataset.figure, location.href).searchParams.get("x") ?? "step";
  }

  // The name of the horizontal axis in the address. Only steps are the same in all charts.
  axis() {
    const { id, dataset } = this.element;
    const unit = this.unit();
    return unit === "step" ? dataset.axis || `${id}.range` : `${id}.${unit}`;
  }

  // Take the ranges from the address.
  restore() {
    this.name = this.axis();
    this.zoom = addressRange(this.name);
    this.height = addressRange(`${this.element.id}.y`);
    this.markZoom();
  }

  address() {
    const url = new URL(this.element.dataset.figure, location.href);
    for (const [name, value] of this.controls()) url.searchParams.set(name, value);
    if (this.axis() !== this.name) {
      this.name = this.axis();
      this.zoom = addressRange(this.name);
      this.markZoom();
    }
    this.compact = this.isCompact();
    url.searchParams.set("theme", isDark() ? "dark" : "light");
    if (this.compact) url.searchParams.set("compact", "1");
    if (this.zoom && "zoom" in this.element.dataset) {
      const isOverSteps = this.unit() === "step";
      const [from, to] = isOverSteps ? [Math.floor(this.zoom[0]), Math.ceil(this.zoom[1])] : this.zoom;
      url.searchParams.set(isOverSteps ? "first" : "from", from);
      url.searchParams.set(isOverSteps ? "last" : "to", to);
    }
    return url;
  }

  async load() {
    if (this.request) { this.again = true; return; }
    this.request = new AbortController();
    this.isDue = false;
    this.again = false;
    this.isOutdated = false;
    if (!this.drawn && this.element.dataset.state !== "drawn") this.show("loading");
    const slow = setTimeout(() => this.sayLoading(), SLOW_AFTER);
    const start = performance.now();
    // An error is shown when the chart is drawn.
    loadPlotly().catch(() => {});
    try {
      const answer = this.givenAnswer() ?? await this.fetchFigure(this.request);
      const note = await this.draw(answer);
      delete this.element.dataset.stale;
      this.note(note);
    } catch (error) {
      if (!this.isOutdated) this.fail(error);
    } finally {
      clearTimeout(slow);
      this.loadTime = performance.now() - start;
      this.request = null;
    }
    if (this.isOutdated) this.refresh();
    else if (this.again) setTimeout(() => this.refresh(), Math.min(4000, 2 * this.loadTime));
  }

  givenAnswer() {
    const { text, until } = this.given ?? {};
    this.given = null;
    if (!text || performance.now() > until) return null;
    this.linkData(this.address());
    return JSON.parse(text);
  }

  async fetchFigure(request) {
    const address = this.address();
    this.linkData(address);
    const timeout = setTimeout(() => request.abort(new Error(`the server did not answer within ${TIMEOUT / 1000} s`)), TIMEOUT);
    try {
      const answer = await fetch(address, { headers: { Accept: "application/json" }, signal: request.signal });
      if (answer.redirected) { location.reload(); throw new Error("signed out"); }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      return await answer.json();
    } catch (error) {
      throw error instanceof TypeError ? new Error("the server cannot be reached") : error;
    } finally {
      clearTimeout(timeout);
    }
  }

  // Returns what to say about the chart.
  async draw(answer) {
    // The chart of another range stays, so that its reader can go on from there.
    if (answer.empty !== undefined && this.drawn && this.zoom) return "No values in this range";
    if (answer.empty !== undefined) {
      if (this.drawn) window.Plotly.purge(this.plot);
      // Without a chart there is nothing to stop at with the Tab key.
      for (const name of ["data-drawn", "role", "aria-label", "tabindex"]) this.plot.removeAttribute(name);
      this.drawn = false;
      this.listening = false;
      this.element.style.removeProperty("--figure-height");
      this.show("empty", answer.empty);
      return "";
    }
    const Plotly = await loadPlotly();
    const theme = isDark() ? "dark" : "light";
    await turn(this.element, async () => {
      if (!this.element.isConnected) return;
      const { data, layout } = answer.figure;
      this.meta = layout.meta;
      this.keepRanges(layout);
      // A drag on a phone scrolls the page; a narrow chart beside others is zoomed with the mouse as any.
      if (layout.dragmode === false && matchMedia("(pointer: fine)").matches) layout.dragmode = "zoom";
      shortenNames(data, this.element.clientWidth);
      this.element.style.setProperty("--figure-height", `${layout.height}px`);
      this.band = undefined;
      await Plotly.react(this.plot, data, layout, CONFIG);
      this.plot.dataset.drawn = theme;
      this.plot.setAttribute("role", "img");
      this.plot.setAttribute("aria-label", answer.summary);
      this.plot.tabIndex = 0;
      this.drawn = true;
      this.show("ready");
      this.addListeners();
      this.element.querySelector(".figure__drawn")?.remove();
      this.markDrawn();
    });
    return "";
  }

  // The time of the last drawing, for measurements.
  markDrawn() {
    const name = `fp8:drawn:${this.element.id}`;
    performance.clearMarks(name);
    performance.mark(name);
  }

  // Plotly keeps what the reader zoomed as long as the uirevision is the same. This class keeps it instead,
  // because ranges also come from the address and from other charts.
  keepRanges(layout) {
    for (const name of Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key))) {
      layout[name].uirevision = this.revision;
      if (this.zoom) Object.assign(layout[name], { range: this.zoom, autorange: false });
    }
    if (!layout.yaxis) return;
    layout.yaxis.uirevision = this.revision;
    if (this.height) Object.assign(layout.yaxis, { range: this.height, autorange: false });
  }

  addListeners() {
    if (this.listening) return;
    this.listening = true;
    this.plot.on("plotly_click", (event) => {
      const point = event.points?.[0];
      if (point) this.element.dispatchEvent(new CustomEvent("fp8:point", { bubbles: true, detail: { point, meta: this.meta } }));
    });
    this.plot.on("plotly_hover", (event) => {
      this.tellHover(event.xvals?.[0] ?? event.points?.[0]?.x);
      this.showBand(event.points?.[0]?.data.legendgroup);
    });
    this.plot.on("plotly_unhover", () => this.tellHover(null));
    this.plot.on("plotly_doubleclick", () => this.showAll());
    this.plot.on("plotly_relayout", (change) => {
      const zoom = rangeAfter(change, "x");
      const height = rangeAfter(change, "y");
      if (height !== undefined) this.setHeight(height);
      if (zoom !== undefined && !same(zoom, this.zoom)) publish("fp8:range", { axis: this.name, range: zoom });
    });
  }

  // Of many curves, only the one that the pointer was over last shows its band.
  showBand(group) {
    if (this.plot.layout.hovermode !== "closest" || group === undefined || group === this.band) return;
    const indices = [...this.plot.data.keys()].filter((index) => this.plot.data[index].meta === "band");
    if (!indices.length) return;
    this.band = group;
    window.Plotly.restyle(this.plot, { visible: indices.map((index) => this.plot.data[index].legendgroup === group) }, indices);
  }

  // Zooming requests new data, because the data of the whole range is downsampled.
  setRange(range) {
    if (same(range, this.zoom)) return;
    this.zoom = range;
    this.markZoom();
    if (this.drawn && range && !same(this.plot.layout.xaxis?.range?.map(Number), range)) {
      const axes = Object.keys(this.plot.layout).filter((key) => /^xaxis\d*$/.test(key));
      window.Plotly.relayout(this.plot, Object.fromEntries(axes.map((axis) => [`${axis}.range`, range])));
    }
    this.refresh({ now: true });
  }

  setHeight(range) {
    if (same(range, this.height)) return;
    this.height = range;
    this.markZoom();
    publish("fp8:view", { name: `${this.element.id}.y`, value: range && range.map(rounded).join("..") });
  }

  showAll() {
    const hadHeight = this.height !== null;
    this.setHeight(null);
    if (this.zoom) publish("fp8:range", { axis: this.name, range: null });
    else if (hadHeight) this.refresh({ now: true });
  }

  markZoom() {
    this.revision += 1;
    const button = this.element.querySelector("[data-reset]");
    if (button) button.hidden = !this.zoom && !this.height;
  }

  tellHover(x) {
    if (typeof x === "number" || x === null) publish("fp8:hover", { axis: this.name, x, source: this.element });
  }

  showCross(x) {
    this.cross ??= this.element.appendChild(Object.assign(document.createElement("div"), { className: "figure__cross" }));
    const layout = this.drawn && this.plot._fullLayout;
    const axis = layout?.xaxis;
    const left = axis && x !== null ? axis.d2p(x) : NaN;
    this.cross.hidden = !(left >= 0 && left <= axis._length);
    if (this.cross.hidden) return;
    const { t, h } = layout._size;
    Object.assign(this.cross.style, { left: `${axis._offset + left}px`, top: `${t}px`, height: `${h}px` });
  }

  // Arrow keys read values; + and - zoom; 0 shows everything.
  onKey(event) {
    if (!this.drawn || event.ctrlKey || event.metaKey || event.altKey || event.target !== this.plot) return;
    const axis = this.plot._fullLayout?.xaxis;
    if (!axis || axis.type === "category") return;
    const [low, high] = axis.range.map((end) => axis.r2l(end));
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (move !== undefined) this.step(move, low, high);
    else if (event.key === "+" || event.key === "-") {
      const middle = this.at ?? (low + high) / 2;
      const factor = event.key === "+" ? 0.5 : 2;
      publish("fp8:range", { axis: this.name, range: [middle - (middle - low) * factor, middle + (high - middle) * factor] });
    } else if (event.key === "0") this.showAll();
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  step(move, low, high) {
    const traces = this.plot._fullData.filter((trace) => trace.visible === true && trace.hoverinfo !== "skip" && trace.x?.length > 1);
    const xs = [...new Set(traces.flatMap((trace) => Array.from(trace.x)))].filter((x) => Number.isFinite(x) && x >= low && x <= high).sort((a, b) => a - b);
    if (!xs.length) return;
    let index = this.at === undefined ? -1 : xs.findIndex((x) => x >= this.at);
    index = this.at === undefined ? (move > 0 ? 0 : xs.length - 1) : index + move;
    this.point(xs[Math.max(0, Math.min(xs.length - 1, index))], traces);
  }

  point(x, traces = []) {
    this.at = x ?? undefined;
    // For marks.js.
    this.plot.dataset.at = x ?? "";
    this.tellHover(x);
    this.showCross(x);
    const line = this.element.querySelector(".figure__value");
    if (!line) return;
    const values = traces.filter((trace) => trace.type === "scatter" && trace.name).flatMap((trace) => {
      const index = Array.from(trace.x).indexOf(x);
      return index < 0 || !Number.isFinite(trace.y[index]) ? [] : [`${plainText(trace.name)} ${rounded(trace.y[index])}`];
    });
    const axis = this.plot._fullLayout?.xaxis;
    const unit = axis?.title?.text || "step";
    // Of dates, the clock of the axis.
    const said = axis?.type === "date" && x !== null ? new Date(x).toISOString().slice(0, 19).replace("T", " ") : rounded(x);
    line.textContent = x === null ? "" : [`${unit} ${said}`, ...values].join(", ");
  }

  linkData(address) {
    for (const link of this.element.querySelectorAll("[data-format]")) {
      const url = new URL(address);
      url.searchParams.set("format", link.dataset.format);
      link.href = url;
    }
  }

  show(state, text = "") {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(state === "loading"));
    if (state === "empty") {
      this.element.querySelector(".figure__drawn")?.remove();
      this.state.replaceChildren(paragraph(text));
    }
  }

  sayLoading() {
    if (this.drawn || this.element.dataset.state === "drawn") this.note("Still loading…");
    else this.state.replaceChildren(paragraph("Still loading. A long run can take a few seconds."));
    this.element.dataset.slow = "";
  }

  // A line over a chart that is shown but not up to date.
  note(text = "", ...more) {
    delete this.element.dataset.slow;
    const line = this.element.querySelector(".figure__note");
    if (line) line.replaceChildren(text, ...more);
  }

  fail(error) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "button button--small", textContent: "Try again" });
    button.addEventListener("click", () => this.load());
    this.isDue = true;
    if (this.drawn || this.element.dataset.state === "drawn") {
      this.element.dataset.stale = "";
      this.note(`Not up to date: ${error.message}. `, button);
      return;
    }
    delete this.element.dataset.slow;
    this.state.replaceChildren(paragraph(`Cannot load the chart: ${error.message}.`), button);
    this.element.dataset.state = "error";
    this.element.setAttribute("aria-busy", "false");
  }
}

const paragraph = (text) => Object.assign(document.createElement("p"), { textContent: text });
const rounded = (value) => Number(Number(value).toPrecision(6));
const plainText = (html) => new DOMParser().parseFromString(html, "text/html").body.textContent;

const scan = () => {
  for (const [element, figure] of figures) {
    if (!element.isConnected) {
      nearby.unobserve(element);
      if (figure.drawn) window.Plotly.purge(figure.plot);
      figures.delete(element);
    }
  }
  for (const element of document.querySelectorAll("[data-figure]")) {
    if (!figures.has(element)) figures.set(element, new Figure(element));
  }
};

const onControlChange = (event) => {
  const form = event.target.closest?.("form[data-controls]");
  if (!form) return;
  for (const id of form.dataset.controls.split(" ")) {
    const figure = figures.get(document.getElementById(id));
    if (!figure) continue;
    // Other values have another scale.
    if (event.target.name) figure.setHeight(null);
    figure.refresh({ now: true });
  }
};

document.addEventListener("change", onControlChange);
let typing;
document.addEventListener("input", (event) => {
  if (event.target.type !== "search") return;
  clearTimeout(typing);
  typing = setTimeout(() => onControlChange(event), 300);
});
document.addEventListener("submit", (event) => {
  if (event.target.matches("form[data-controls]") && !event.target.action) event.preventDefault();
});
document.addEventListener("fp8:theme", () => figures.forEach((figure) => figure.refresh({ now: true })));
document.addEventListener("fp8:change", (event) => {
  for (const [element, figure] of figures) {
    const kinds = (element.dataset.on || "").split(" ");
    if (event.detail.all || kinds.some((kind) => event.detail.kinds.has(kind))) figure.refresh();
  }
});
document.addEventListener("fp8:range", ({ detail }) => {
  for (const figure of figures.values()) if (figure.name === detail.axis) figure.setRange(detail.range);
});
document.addEventListener("fp8:hover", ({ detail }) => {
  for (const [element, figure] of figures) if (figure.name === detail.axis && element !== detail.source) figure.showCross(detail.x);
});
// Back and forward.
document.addEventListener("fp8:restored", () => {
  for (const figure of figures.values()) {
    figure.restore();
    figure.refresh({ now: true });
  }
});
document.addEventListener("htmx:afterSettle", scan);
// The page that brings its first chart has also told the browser to download plotly.
if (document.querySelector(".figure__drawn")) loadPlotly().catch(() => {});

scan();
