// The map of tensors: one row per group or tensor, one column per span of steps.
//
// Rows are elements with their full names, so that they can be read, focused and opened; each has a canvas of one
// pixel per column, which the browser stretches. The choices, the open groups and the range are in the address.

import { percent, plain, spans, wholeNumber } from "./tensor_words.js";
import { openDrawer } from "./tensor_drawer.js";
import { startRanking } from "./tensor_ranking.js";

// The axis that the charts of a page share; see figure.js.
const AXIS = "steps";
const NONE_OPEN = "-";
const NO_VALUE = 0;
const ZERO = 1;
const MIDDLE = 128;
const DEBOUNCE = 200;
const TIMEOUT = 30000;
const PAGE = 10;

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

const publish = (name, detail) => document.dispatchEvent(new CustomEvent(name, { detail }));

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// Colours between the given ones, at equal distances.
const between = (colours, share) => {
  const at = share * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const [from, to] = [rgb(colours[low]), rgb(colours[low + 1])];
  return from.map((value, i) => Math.round(value + (to[i] - value) * (at - low)));
};

const palette = (document_, theme) => {
  const { heat, cool } = document_.colours[theme];
  const own = document_.statistic.endsWith("_rate") || ["saturated", "nonfinite"].includes(document_.statistic) ? heat : cool;
  return Array.from({ length: 256 }, (_, level) => {
    if (document_.signed) {
      const share = (level - MIDDLE) / 127;
      return share < 0 ? between(cool, Math.min(1, -share)) : between(heat, share);
    }
    return level <= ZERO ? rgb(own[0]) : between(own.slice(1), (level - 2) / 253);
  });
};

class TensorMap {
  constructor(element) {
    this.element = element;
    this.form = document.getElementById("tensor-form");
    this.grid = element.querySelector("[data-grid]");
    this.state = element.querySelector("[data-state-text]");
    this.readout = element.querySelector("[data-readout]");
    this.live = element.querySelector("[data-live-text]");
    this.axis = element.querySelector("[data-axis]");
    this.legend = element.querySelector("[data-legend]");
    this.cursor = element.querySelector("[data-cursor]");
    this.brush = element.querySelector("[data-brush]");
    this.reset = element.querySelector("[data-reset]");
    this.row = 0;
    this.column = null;
    this.restore();
    this.isNear = false;
    this.isDue = true;
    this.life = new AbortController();
    this.listen(this.life.signal);
    this.nearby = new IntersectionObserver((entries) => {
      this.isNear = entries.at(-1).isIntersecting;
      if (this.isNear && this.isDue) this.load();
    }, { rootMargin: "250px" });
    this.nearby.observe(element);
  }

  // Another tab of the page replaced the element.
  stop() {
    this.life.abort();
    this.nearby.disconnect();
    this.request?.abort();
  }

  restore() {
    const query = new URLSearchParams(location.search);
    const range = (query.get(AXIS) ?? "").split("..").map((part) => (part.trim() ? Number(part) : NaN));
    this.range = range.length === 2 && range.every(Number.isFinite) ? range : null;
    this.open = query.get("tensors.open");
    this.form.querySelector("[data-against]").hidden = this.form.elements.mode.value !== "difference";
  }

  // ---- loading

  query() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(this.form)) if (value) query.set(name, value);
    if (this.open !== null) query.set("open", this.open);
    if (this.range) {
      query.set("first", Math.floor(this.range[0]));
      query.set("last", Math.ceil(this.range[1]));
    }
    return query;
  }

  refresh() {
    this.isDue = true;
    if (this.isNear) this.load();
  }

  async load() {
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    this.isDue = false;
    const query = this.query();
    if (!this.document) this.show("loading", "Loading…");
    const slow = setTimeout(() => { if (!this.document) this.show("loading", "Still loading…"); }, 4000);
    const late = setTimeout(() => request.abort(new Error("the server did not answer in 30 s")), TIMEOUT);
    try {
      const answer = await fetch(`${this.element.dataset.map}?${query}`, { signal: request.signal, headers: { Accept: "application/json" } });
      if (answer.redirected) { location.reload(); return; }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const content = await answer.json();
      if (request !== this.request) return;
      this.link(query);
      if (content.empty !== undefined) {
        this.document = null;
        this.show("empty", content.empty);
      } else this.draw(content);
    } catch (error) {
      if (request !== this.request) return;
      this.fail(request.signal.aborted ? request.signal.reason : error);
    } finally {
      clearTimeout(slow);
      clearTimeout(late);
    }
  }

  link(query) {
    for (const link of this.element.querySelectorAll("[data-download]")) {
      link.href = `${link.dataset.download}?${query}`;
    }
  }

  show(state, text = "") {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(state === "loading"));
    this.state.replaceChildren(Object.assign(document.createElement("p"), { textContent: text }));
  }

  fail(error) {
    if (this.document) { this.element.dataset.stale = ""; return; }
    // A TypeError is all that fetch says of a connection that failed.
    const reason = error instanceof TypeError ? "the server cannot be reached" : error.message;
    this.show("error", `Cannot load the map: ${reason}.`);
    const button = Object.assign(document.createElement("button"), { type: "button", className: "button button--small", textContent: "Try again" });
    button.addEventListener("click", () => this.load());
    this.state.append(button);
    this.isDue = true;
  }

  // ---- drawing

  draw(content) {
    const focused = this.grid.contains(document.activeElement);
    const key = this.document?.rows[this.row]?.key;
    this.document = content;
    delete this.element.dataset.stale;
    this.columns = content.edges.length - 1;
    this.levels = bytes(content.levels);
    this.values = new Float32Array(bytes(content.values).buffer);
    this.column = this.column === null ? null : Math.min(this.column, this.columns - 1);
    this.grid.setAttribute("aria-rowcount", content.rows.length);
    this.grid.setAttribute("aria-colcount", 2);
    this.grid.setAttribute("aria-label", `${content.title} of ${content.tensors} tensors in ${content.rows.length} rows, ${spans(content.edges[0], content.edges.at(-1))}`);
    const rows = content.rows.map((row, i) => this.rowElement(row, i));
    this.grid.replaceChildren(...rows);
    const kept = content.rows.findIndex((row) => row.key === key);
    this.select(kept >= 0 ? kept : 0, focused);
    this.paint();
    this.drawAxis();
    this.reset.hidden = !this.range;
    this.show("ready");
    this.element.querySelector("[data-note]").textContent = this.note();
  }

  note() {
    const { rows, tensors, note } = this.document;
    const count = rows.length < tensors ? `${wholeNumber(tensors)} tensors in ${rows.length} rows; a group shows the extreme of its tensors.` : "";
    return [count, note && `Shown ${note}.`].filter(Boolean).join(" ");
  }

  rowElement(row, i) {
    const element = document.createElement("div");
    element.className = `tmap__row${row.open === null ? "" : " tmap__row--group"}`;
    element.setAttribute("role", "row");
    element.setAttribute("aria-level", row.level + 1);
    element.setAttribute("aria-rowindex", i + 1);
    if (row.open !== null) element.setAttribute("aria-expanded", row.open);
    element.tabIndex = -1;
    element.dataset.row = i;
    const name = document.createElement("div");
    name.className = "tmap__name";
    name.setAttribute("role", "rowheader");
    name.style.setProperty("--level", row.level);
    const button = Object.assign(document.createElement("button"), { type: "button", tabIndex: -1, className: "tmap__button" });
    const title = row.open === null ? row.label : `${row.label} (${row.tensors} tensors)`;
    button.title = title;
    button.setAttribute("aria-label", title);
    // Where there is little room, the beginning is left out: the end tells more.
    const label = Object.assign(document.createElement("span"), { className: "end-visible" });
    label.append(
      Object.assign(document.createElement("bdi"), { textContent: row.label, className: "tmap__full" }),
      Object.assign(document.createElement("bdi"), { textContent: row.short, className: "tmap__short" }),
    );
    button.append(label);
    if (row.open !== null) button.append(Object.assign(document.createElement("span"), { className: "tmap__count", textContent: row.tensors }));
    name.append(button);
    const cell = document.createElement("div");
    cell.className = "tmap__strip";
    cell.setAttribute("role", "gridcell");
    const canvas = Object.assign(document.createElement("canvas"), { width: this.columns, height: 1 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", this.largest(i));
    cell.append(canvas);
    element.append(name, cell);
    return element;
  }

  paint() {
    const theme = isDark() ? "dark" : "light";
    this.element.dataset.drawn = theme;
    const colours = palette(this.document, theme);
    for (const [i, row] of [...this.grid.children].entries()) {
      const context = row.querySelector("canvas").getContext("2d");
      const image = context.createImageData(this.columns, 1);
      for (let c = 0; c < this.columns; c += 1) {
        const level = this.levels[i * this.columns + c];
        if (level === NO_VALUE) continue;
        image.data.set([...colours[level], 255], 4 * c);
      }
      context.putImageData(image, 0, 0);
    }
    const stops = Array.from({ length: 24 }, (_, i) => {
      const level = Math.round((this.document.signed ? 1 : 2) + (i / 23) * (this.document.signed ? 254 : 253));
      return `rgb(${colours[level].join(" ")})`;
    });
    const zero = this.document.signed ? [] : [`rgb(${colours[ZERO].join(" ")}) 0 12%`];
    const rest = stops.map((colour, i) => `${colour} ${(this.document.signed ? 0 : 12) + (i / 23) * (this.document.signed ? 100 : 88)}%`);
    this.legend.querySelector("span").style.background = `linear-gradient(90deg, ${[...zero, ...rest].join(", ")})`;
    const labels = this.document.marks.map(([level, text]) => {
      const label = Object.assign(document.createElement("span"), { textContent: text });
      label.style.left = `${this.document.signed ? (100 * (level - 1)) / 254 : level === ZERO ? 0 : 12 + (88 * (level - 2)) / 253}%`;
      return label;
    });
    this.legend.querySelector("div").replaceChildren(...labels);
  }

  drawAxis() {
    const { edges } = this.document;
    const [low, high] = [edges[0], edges.at(-1) - 1];
    const count = this.axis.clientWidth < 420 ? 3 : 6;
    const raw = Math.max(1, (high - low) / count);
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
    const ticks = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
    this.axis.replaceChildren(...ticks.map((at) => {
      const tick = Object.assign(document.createElement("span"), { textContent: wholeNumber(at) });
      const share = this.shareOf(at);
      tick.style.left = `${100 * share}%`;
      // Ticks at the ends stay inside.
      if (share < 0.03) tick.dataset.end = "first";
      else if (share > 0.97) tick.dataset.end = "last";
      return tick;
    }));
  }

  // ---- positions

  shareOf(step) {
    const { edges } = this.document;
    let column = edges.findIndex((edge) => edge > step) - 1;
    if (column < 0) column = step < edges[0] ? 0 : this.columns - 1;
    const inside = (step - edges[column]) / (edges[column + 1] - edges[column]);
    return Math.min(1, Math.max(0, (column + inside) / this.columns));
  }

  columnAt(clientX) {
    const box = this.axis.getBoundingClientRect();
    return Math.min(this.columns - 1, Math.max(0, Math.floor(((clientX - box.left) / box.width) * this.columns)));
  }

  valueAt(row, column) { return this.values[row * this.columns + column]; }

  words(value) {
    if (Number.isNaN(value)) return "no value";
    const { mode, statistic } = this.document;
    const isRate = statistic.endsWith("_rate");
    if (mode === "change" || (mode === "difference" && !isRate)) return `${value < 0 ? "÷" : "×"} ${plain(2 ** Math.abs(value))}`;
    if (isRate) return percent(value, mode === "difference");
    return plain(value);
  }

  largest(row) {
    let best = -1;
    for (let c = 0; c < this.columns; c += 1) {
      const value = Math.abs(this.valueAt(row, c));
      if (!Number.isNaN(value) && (best < 0 || value > Math.abs(this.valueAt(row, best)))) best = c;
    }
    return best < 0 ? "no values" : `largest ${this.words(this.valueAt(row, best))} at ${this.span(best)}`;
  }

  span(column) { return spans(this.document.edges[column], this.document.edges[column + 1]); }

  describe(row, column) {
    const { label, tensors, open } = this.document.rows[row];
    const name = open === null ? label : `${label}, extreme of ${tensors} tensors`;
    return column === null ? `${name}: ${this.largest(row)}` : `${name}, ${this.span(column)}: ${this.words(this.valueAt(row, column))}`;
  }

  // ---- moving

  select(row, focus) {
    const elements = this.grid.children;
    this.row = Math.min(Math.max(row, 0), elements.length - 1);
    for (const [i, element] of [...elements].entries()) element.tabIndex = i === this.row ? 0 : -1;
    if (focus) elements[this.row]?.focus({ preventScroll: false });
  }

  point(column, { tell = true } = {}) {
    this.column = column;
    this.cursor.hidden = column === null;
    if (column === null) return;
    this.cursor.style.left = `${(100 * (column + 0.5)) / this.columns}%`;
    if (tell) {
      const { edges } = this.document;
      const step = Math.floor((edges[column] + edges[column + 1] - 1) / 2);
      publish("fp8:hover", { axis: AXIS, x: step, source: this.element });
    }
  }

  say(text, live) {
    this.readout.textContent = text;
    if (live) this.live.textContent = text;
  }

  toggle(row) {
    const { rows } = this.document;
    const open = new Set(rows.filter((each) => each.open).map((each) => each.key));
    if (!open.delete(rows[row].key)) open.add(rows[row].key);
    this.keepOpen([...open].join(",") || NONE_OPEN);
    this.say(`${rows[row].label} ${open.has(rows[row].key) ? "opened" : "closed"}`, true);
    this.load();
  }

  enter(row) {
    const { open, index } = this.document.rows[row];
    if (open === null) openDrawer(index);
    else this.toggle(row);
  }

  zoom(range) {
    this.point(null);
    publish("fp8:range", { axis: AXIS, range });
  }

  // ---- events

  listen(signal) {
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
    this.grid.addEventListener("focusin", (event) => {
      const row = event.target.closest("[data-row]");
      if (row && event.target === row) { this.select(Number(row.dataset.row), false); this.say(this.describe(this.row, this.column), false); }
    });
    this.grid.addEventListener("click", (event) => {
      const button = event.target.closest(".tmap__button");
      if (!button) return;
      const row = Number(button.closest("[data-row]").dataset.row);
      this.select(row, true);
      this.enter(row);
    });
    this.listenToPointer(signal);
    this.reset.addEventListener("click", () => this.zoom(null));
    this.form.addEventListener("change", (event) => this.onChoice(event));
    this.form.addEventListener("input", (event) => {
      if (event.target.type !== "search") return;
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.onChoice(event), DEBOUNCE);
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    document.addEventListener("fp8:range", ({ detail: { axis, range } }) => {
      if (axis !== AXIS || JSON.stringify(range) === JSON.stringify(this.range)) return;
      this.range = range;
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.refresh(), DEBOUNCE);
    }, { signal });
    document.addEventListener("fp8:hover", ({ detail: { axis, x: step, source } }) => {
      if (axis !== AXIS || source === this.element || !this.document) return;
      const { edges } = this.document;
      const inside = Number.isFinite(step) && step >= edges[0] && step < edges.at(-1);
      this.point(inside ? Math.floor(this.shareOf(step) * this.columns * 0.999999) : null, { tell: false });
    }, { signal });
    // Back and forward.
    document.addEventListener("fp8:restored", () => { this.restore(); this.refresh(); }, { signal });
    document.addEventListener("fp8:theme", () => { if (this.document) this.paint(); }, { signal });
    document.addEventListener("fp8:change", (event) => {
      if (event.detail.all || event.detail.kinds.has("rows")) this.refresh();
    }, { signal });
    new ResizeObserver(() => { if (this.document) this.drawAxis(); }).observe(this.axis);
  }

  onChoice(event) {
    this.form.querySelector("[data-against]").hidden = this.form.elements.mode.value !== "difference";
    // Other tensors and another fold have other groups.
    if (["fold", "role", "filter"].includes(event.target.name)) this.keepOpen(null);
    this.refresh();
  }

  keepOpen(open) {
    this.open = open;
    publish("fp8:view", { name: "tensors.open", value: open });
  }

  onKey(event) {
    if (!this.document || event.altKey || event.ctrlKey || event.metaKey) return;
    const rows = this.document.rows.length;
    const stride = event.shiftKey ? PAGE : 1;
    const vertical = { ArrowDown: this.row + 1, ArrowUp: this.row - 1, Home: 0, End: rows - 1, PageDown: this.row + PAGE, PageUp: this.row - PAGE }[event.key];
    const horizontal = { ArrowRight: stride, ArrowLeft: -stride }[event.key];
    if (vertical !== undefined) {
      this.select(vertical, true);
      this.say(this.describe(this.row, this.column), true);
    } else if (horizontal !== undefined) {
      const from = this.column ?? (horizontal > 0 ? -1 : this.columns);
      this.point(Math.min(this.columns - 1, Math.max(0, from + horizontal)));
      this.say(this.describe(this.row, this.column), true);
    } else if (event.key === "Enter" || event.key === " ") this.enter(this.row);
    else if ((event.key === "+" || event.key === "-") && this.document.rows[this.row].open === (event.key === "-")) this.toggle(this.row);
    else return;
    event.preventDefault();
  }

  listenToPointer(signal) {
    let start = null;
    this.grid.addEventListener("pointermove", (event) => {
      const row = event.target.closest(".tmap__strip")?.closest("[data-row]");
      if (!row || !this.document) return;
      const column = this.columnAt(event.clientX);
      this.point(column);
      this.say(this.describe(Number(row.dataset.row), column), false);
      if (start !== null) this.showBrush(start, column);
    });
    this.grid.addEventListener("pointerdown", (event) => {
      // Touch scrolls the page.
      if (event.button !== 0 || event.pointerType === "touch" || !event.target.closest(".tmap__strip") || !this.document) return;
      start = this.columnAt(event.clientX);
      const row = Number(event.target.closest("[data-row]").dataset.row);
      this.select(row, false);
      event.preventDefault();
      this.grid.children[row].focus({ preventScroll: true });
    });
    addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [low, high] = [start, this.columnAt(event.clientX)].sort((a, b) => a - b);
      start = null;
      this.brush.hidden = true;
      const { edges } = this.document;
      if (high > low) this.zoom([edges[low], edges[high + 1] - 1]);
    }, { signal });
    this.grid.addEventListener("pointerleave", () => {
      if (start !== null || this.grid.contains(document.activeElement)) return;
      this.point(null);
      publish("fp8:hover", { axis: AXIS, x: null, source: this.element });
    });
  }

  showBrush(from, to) {
    const [low, high] = [Math.min(from, to), Math.max(from, to) + 1];
    this.brush.hidden = false;
    this.brush.style.left = `${(100 * low) / this.columns}%`;
    this.brush.style.width = `${(100 * (high - low)) / this.columns}%`;
  }
}

let map = null;
const start = () => {
  const element = document.getElementById("tensors");
  if (map?.element === element) return;
  map?.stop();
  map = element && new TensorMap(element);
  if (element) startRanking(document.getElementById("tensor-ranking"));
};
// The tabs of a run replace each other.
document.addEventListener("htmx:afterSettle", start);
start();
