// The picture of one tensor: its exponents in the zones of a format, now and as proposed. The server sends the shares
// of every margin at once, so that the slider only looks them up.

import { percent, plain, superscript, wholeNumber } from "./tensor_words.js";

const SVG = "http://www.w3.org/2000/svg";
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [250, 46, 10, 34, 40];
const [MIN_WIDTH, MAX_WIDTH] = [280, 760];
const ZONES = ["saturates", "normal", "subnormal", "flushes to zero"];
const NAMES = { saturates: "saturates", normal: "normal", subnormal: "subnormal", "flushes to zero": "flushes" };
const MIN_SPAN = 16;

const make = (name, attributes, text) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};

// The zone of a bin, by its middle: a limit may lie inside.
const zoneOf = (exponent, [largest, normal, , flushed]) => {
  const middle = exponent + Math.log2(1.5);
  if (middle > largest) return ZONES[0];
  if (middle <= flushed) return ZONES[3];
  return middle < normal ? ZONES[2] : ZONES[1];
};

// The parts of the bins by zone. Where a limit lies inside of a bin, `shares` say how many elements are beyond it:
// those of the outcome that are in no bin further out.
const partsOf = ({ bins, numel }, zones, shares) => bins.flatMap(([exponent, count]) => {
  const [from, to] = [exponent, exponent + 1];
  if (!zones) return [{ exponent, from, to, count, zone: ZONES[1] }];
  const [largest, , , flushed] = zones;
  const cut = shares && [largest, flushed].find((limit) => limit > from && limit < to);
  if (cut === undefined || !shares) return [{ exponent, from, to, count, zone: zoneOf(exponent, zones) }];
  const isAbove = cut === largest;
  const outside = bins.reduce((sum, [other, n]) => (isAbove ? other > exponent : other < exponent) ? sum + n : sum, 0);
  const beyond = Math.min(count, Math.max(0, (isAbove ? shares.saturated : shares.flushed) * numel - outside));
  const parts = isAbove
    ? [{ from, to: cut, count: count - beyond, zone: ZONES[1] }, { from: cut, to, count: beyond, zone: ZONES[0] }]
    : [{ from, to: cut, count: beyond, zone: ZONES[3] }, { from: cut, to, count: count - beyond, zone: ZONES[2] }];
  // Estimates are rounded: a part of an element is none.
  return parts.filter((part) => part.count >= 0.5).map((part) => ({ exponent, ...part }));
});

class Chart {
  constructor(svg, picture) {
    this.svg = svg;
    this.picture = picture;
    // One unit is one pixel, so that text has its size on every screen.
    this.width = Math.min(MAX_WIDTH, Math.max(MIN_WIDTH, svg.clientWidth));
    const exponents = picture.bins.map(([exponent]) => exponent);
    const limits = [picture.current, picture.proposed].filter(Boolean).flatMap((side) => side.zones[side.zones.length >> 1]);
    const finite = limits.filter(Number.isFinite);
    let low = Math.floor(Math.min(...exponents, ...finite)) - 2;
    let high = Math.ceil(Math.max(...exponents, ...finite)) + 4;
    const missing = Math.max(0, MIN_SPAN - (high - low));
    low -= Math.floor(missing / 2);
    high += Math.ceil(missing / 2);
    [this.low, this.high] = [low, high];
    this.bottomShare = 0.5 / Math.max(picture.numel, 1);
  }

  x(exponent) { return LEFT + ((exponent - this.low) / (this.high - this.low)) * (this.width - LEFT - RIGHT); }

  y(share) {
    const depth = Math.log10(Math.max(share, this.bottomShare)) / Math.log10(this.bottomShare);
    return TOP + Math.min(1, Math.max(0, depth)) * (HEIGHT - TOP - BOTTOM);
  }

  draw(zones, label, shares) {
    const parts = [make("title", {}, label)];
    if (zones) parts.push(...this.bands(zones));
    parts.push(...this.axes(), ...this.bars(zones, shares), ...this.ranks());
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
  }

  bands([largest, normal, , flushed]) {
    const edges = [this.low, flushed, normal, largest, this.high].map((edge) => Math.min(this.high, Math.max(this.low, edge)));
    return [...ZONES].reverse().flatMap((zone, i) => {
      const [left, right] = [this.x(edges[i]), this.x(edges[i + 1])];
      if (right - left < 1) return [];
      const kind = zone.split(" ")[0];
      const band = make("rect", { x: left, y: TOP, width: right - left, height: HEIGHT - TOP - BOTTOM, class: `zone zone--${kind}` });
      const line = i ? [make("line", { x1: left, x2: left, y1: TOP, y2: HEIGHT - BOTTOM, class: "zone__edge" })] : [];
      const text = NAMES[zone];
      const fits = right - left > 6.2 * text.length + 6;
      return [band, ...line, ...(fits ? [make("text", { x: (left + right) / 2, y: TOP - 8, "text-anchor": "middle", class: `zone__name zone__name--${kind}` }, text)] : [])];
    });
  }

  axes() {
    const parts = [make("line", { x1: LEFT, x2: this.width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" })];
    const every = this.high - this.low > 48 ? 16 : this.high - this.low > 24 ? 8 : 4;
    for (let at = Math.ceil(this.low / every) * every; at <= this.high; at += every) {
      parts.push(make("text", { x: this.x(at), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle", class: "tick" }, `2${superscript(at)}`));
    }
    parts.push(make("text", { x: (LEFT + this.width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle", class: "tick" }, "|x|"));
    const decades = Math.ceil(-Math.log10(this.bottomShare));
    const stride = Math.ceil(decades / 5);
    for (let power = 0; power < decades; power += stride) {
      const label = power <= 5 ? `${Number((100 * 10 ** -power).toPrecision(1))} %` : `10${superscript(-power)}`;
      parts.push(make("text", { x: LEFT - 6, y: this.y(10 ** -power) + 4, "text-anchor": "end", class: "tick" }, label));
    }
    return parts;
  }

  bars(zones, shares) {
    return partsOf(this.picture, zones, shares).map(({ exponent, from, to, count, zone }) => {
      const share = count / this.picture.numel;
      const [left, right, top] = [this.x(from) + 0.5, this.x(to) - 0.5, this.y(share)];
      const bar = make("rect", { x: left, y: top, width: Math.max(0.5, right - left), height: Math.max(0, HEIGHT - BOTTOM - top), class: `bin bin--${zone.split(" ")[0]}` });
      bar.append(make("title", {}, `2${superscript(exponent)} ≤ |x| < 2${superscript(exponent + 1)}: ${percent(share)}${zones ? `, ${zone}` : ""}`));
      return bar;
    });
  }

  // The share of each rank's own elements, as steps over the bars.
  ranks() {
    return this.picture.ranks.map(({ rank, total, bins }) => {
      const counts = new Map(bins);
      let path = "";
      for (let exponent = this.low; exponent < this.high; exponent += 1) {
        const y = this.y((counts.get(exponent) ?? 0) / total);
        path += `${path ? "L" : "M"}${this.x(exponent)} ${y}L${this.x(exponent + 1)} ${y}`;
      }
      const line = make("path", { d: path, class: "rank" });
      line.append(make("title", {}, `rank ${rank}`));
      return line;
    });
  }
}

const share = (triple, estimateOnly) => {
  if (!triple || triple[1] === null) return "–";
  const [low, estimate, high] = triple;
  if (estimateOnly || percent(low) === percent(high)) return percent(estimate);
  return `${percent(estimate)}\n(${percent(low).replace(/\s?%$/, "")}–${percent(high)})`;
};

// The estimated shares beyond the limits of one scale; null where they are not known.
const lost = (of, i) => (of?.saturated ? { saturated: of.saturated[i][1] ?? 0, flushed: of.flushed[i][1] ?? 0 } : null);

class Picture {
  constructor(element) {
    this.element = element;
    this.form = element.querySelector("[data-picture-form]");
    this.slider = element.querySelector("[data-margin]");
    this.picture = JSON.parse(element.querySelector("[data-picture-data] script").textContent);
    this.adopt(this.picture);
    const asked = new URLSearchParams(location.search).get("margin");
    if (this.isPage && asked !== null) this.moveTo(Number(asked));
    this.form.addEventListener("change", (event) => {
      if (event.target !== this.slider) this.load();
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.slider.addEventListener("input", () => this.showProposal());
    this.slider.addEventListener("change", () => this.remember());
    new ResizeObserver(() => this.draw()).observe(element.querySelector(".pair"));
    element.querySelector("[data-take-advice]").addEventListener("click", () => { this.moveTo(this.picture.advice.margin); this.slider.focus(); });
  }

  // The address belongs to the page of the run while this is in the drawer.
  get isPage() { return "page" in this.element.dataset; }

  async load() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(this.form)) if (value && name !== "margin") query.set(name, value);
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    const problem = this.element.querySelector("[data-problem]");
    try {
      const answer = await fetch(`${this.element.dataset.picture}?${query}`, { signal: request.signal, headers: { Accept: "application/json" } });
      if (answer.redirected) { location.reload(); return; }
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const content = await answer.json();
      if (content.empty !== undefined) throw new Error(content.empty);
      problem.hidden = true;
      this.adopt(content);
      this.remember();
    } catch (error) {
      if (request !== this.request || error.name === "AbortError") return;
      problem.hidden = false;
      problem.textContent = `Cannot compute this: ${error.message}`;
    }
  }

  adopt(picture) {
    this.picture = picture;
    const { proposed } = picture;
    this.slider.disabled = !proposed.perTensor;
    this.slider.min = proposed.margins[0];
    this.slider.max = proposed.margins.at(-1);
    this.slider.value = proposed.chosen;
    this.element.querySelector("[data-advice]").textContent = picture.advice.text;
    this.element.querySelector("[data-at-step]").textContent = wholeNumber(picture.step);
    this.draw();
  }

  draw() {
    this.charts = ["now", "proposed"].map((name) => new Chart(this.element.querySelector(`[data-chart="${name}"]`), this.picture));
    this.showNow();
    this.showProposal();
  }

  moveTo(margin) {
    if (!Number.isInteger(margin)) return;
    this.slider.value = margin;
    this.showProposal();
    this.remember();
  }

  remember() {
    if (!this.isPage) return;
    const url = new URL(location.href);
    for (const name of ["format", "part", "step"]) {
      const field = this.form.elements[name];
      if (field.value === field.dataset.default) url.searchParams.delete(name);
      else url.searchParams.set(name, field.value);
    }
    if (Number(this.slider.value) === this.picture.proposed.chosen) url.searchParams.delete("margin");
    else url.searchParams.set("margin", this.slider.value);
    history.replaceState(history.state, "", url);
  }

  showNow() {
    const { current } = this.picture;
    const title = this.element.querySelector("[data-title=now]");
    title.textContent = current ? `${current.format}, ${current.inBlocks ? "median block scale" : `margin ${current.margin}, scale`} ${plain(current.scale)}` : "Not quantised in this step";
    this.charts[0].draw(current?.zones[0], `Exponents now. ${title.textContent}.`, lost(current, 0));
    this.shares("now", current, 0);
  }

  showProposal() {
    const { proposed, code } = this.picture;
    const margin = Number(this.slider.value);
    const i = proposed.perTensor ? proposed.margins.indexOf(margin) : 0;
    if (i < 0) return;
    const scale = proposed.scales[i];
    const how = proposed.perTensor ? `margin ${margin}, scale ${plain(scale)}` : proposed.how;
    this.element.querySelector("[data-title=proposed]").textContent = `${proposed.format}, ${how}`;
    const shares = proposed.perTensor ? lost(proposed, i) : null;
    this.charts[1].draw(proposed.zones[i], `Exponents as proposed. ${proposed.format}, ${how}.`, shares);
    this.shares("proposed", proposed, i);
    this.element.querySelector("[data-take-advice]").hidden = !proposed.perTensor || margin === this.picture.advice.margin;
    const spoken = `${share(proposed.saturated[i], true)} saturate, ${share(proposed.flushed[i], true)} flush to zero`;
    this.element.querySelector("[data-margin-text]").textContent = proposed.perTensor ? `${margin}` : "none";
    this.slider.setAttribute("aria-valuetext", `margin ${margin}: ${spoken}`);
    const lines = this.element.querySelector("[data-code]");
    const copy = this.element.querySelector("[data-copy-recipe]");
    lines.textContent = code[i] || "fp8scope has no layers in this format and scaling: this is a what-if only.";
    copy.disabled = !code[i];
  }

  shares(side, of, i) {
    const set = (name, text) => { this.element.querySelector(`[data-share="${side}-${name}"]`).textContent = text; };
    if (!of?.saturated) {
      for (const name of ["saturated", "normal", "subnormal", "flushed", "error"]) set(name, "–");
      return;
    }
    const { numel, zeros, nonfinite } = this.picture;
    const [saturated, flushed, subnormal] = [of.saturated[i], of.flushed[i], of.subnormal[i]];
    const rest = 1 - (zeros + nonfinite) / numel;
    set("saturated", share(saturated, !of.perTensor && side === "proposed"));
    set("flushed", share(flushed, !of.perTensor && side === "proposed"));
    set("subnormal", percent(subnormal));
    set("normal", subnormal === null ? "–" : percent(Math.max(0, rest - saturated[1] - flushed[1] - subnormal)));
    set("error", share(of.error[i], true));
  }
}

const start = () => {
  for (const element of document.querySelectorAll("[data-picture]")) {
    if (element.started) continue;
    element.started = true;
    new Picture(element);
  }
};
document.addEventListener("htmx:afterSettle", start);
start();
