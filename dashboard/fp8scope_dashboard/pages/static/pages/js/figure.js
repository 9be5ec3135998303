// Charts: fetches figures as JSON from the server, draws them with plotly, and keeps them up to date.
//
//   <div class="figure" id="loss" data-figure="/…/loss.json" data-on="rows" [data-zoom] [data-clickable]>
//   <form data-controls="loss">   its fields become query parameters
//
// Dispatches fp8:point on the element when a point is clicked.

const COMPACT_BELOW = 620;
const NEAR = "250px";
const CONFIG = {
  responsive: true,
  displaylogo: false,
  showTips: false,
  // By default plotly's mode bar offers to upload charts to its vendor's cloud.
  showSendToCloud: false,
  plotlyServerURL: "",
  topojsonURL: "",
  modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
};

const plotly = new Promise((resolve, reject) => {
  const script = document.getElementById("plotly");
  if (window.Plotly) resolve(window.Plotly);
  else if (!script) reject(new Error("plotly is not on this page"));
  else {
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("the chart script did not load")));
  }
});
plotly.catch(() => {});

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
  || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);

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
    this.zoom = null;
    this.loadTime = 0;
    this.compact = this.isCompact();
    nearby.observe(element);
    new ResizeObserver(() => {
      if (this.isCompact() !== this.compact) this.refresh();
    }).observe(element);
  }

  isCompact() { return this.element.clientWidth < COMPACT_BELOW; }

  setNear(isNear) {
    this.isNear = isNear;
    if (isNear && this.isDue) this.load();
  }

  refresh() {
    this.isDue = true;
    if (this.isNear) this.load();
  }

  address() {
    const url = new URL(this.element.dataset.figure, location.href);
    for (const form of document.querySelectorAll(`form[data-controls~="${this.element.id}"]`)) {
      for (const [name, value] of new FormData(form)) if (name !== "csrfmiddlewaretoken") url.searchParams.set(name, value);
    }
    this.compact = this.isCompact();
    url.searchParams.set("theme", isDark() ? "dark" : "light");
    if (this.compact) url.searchParams.set("compact", "1");
    if (this.zoom) {
      url.searchParams.set("first", Math.floor(this.zoom[0]));
      url.searchParams.set("last", Math.ceil(this.zoom[1]));
    }
    return url;
  }

  async load() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    this.isDue = false;
    this.again = false;
    const isFirst = !this.drawn;
    if (isFirst) this.show("loading");
    const start = performance.now();
    try {
      await this.draw(await this.fetchFigure());
      delete this.element.dataset.stale;
    } catch (error) {
      if (isFirst) this.fail(error); else this.element.dataset.stale = "";
    } finally {
      this.loadTime = performance.now() - start;
      this.loading = false;
    }
    if (this.again) setTimeout(() => this.refresh(), Math.min(4000, 2 * this.loadTime));
  }

  async fetchFigure() {
    const answer = await fetch(this.address(), { headers: { Accept: "application/json" } });
    if (answer.redirected) { location.reload(); throw new Error("signed out"); }
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  }

  async draw(answer) {
    if (answer.empty !== undefined) {
      if (this.drawn) (await plotly).purge(this.plot);
      this.drawn = false;
      this.element.style.removeProperty("--figure-height");
      this.show("empty", answer.empty);
      return;
    }
    const { data, layout } = answer.figure;
    const Plotly = await plotly;
    if (!this.element.isConnected) return;
    this.element.style.setProperty("--figure-height", `${layout.height}px`);
    this.meta = layout.meta;
    await Plotly.react(this.plot, data, layout, CONFIG);
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", answer.summary);
    if (!this.drawn) this.addListeners();
    this.drawn = true;
    this.show("ready");
  }

  addListeners() {
    if (this.hasListeners) return;
    this.hasListeners = true;
    this.plot.on("plotly_click", (event) => {
      const point = event.points?.[0];
      if (point) this.element.dispatchEvent(new CustomEvent("fp8:point", { bubbles: true, detail: { point, meta: this.meta } }));
    });
    if (!("zoom" in this.element.dataset)) return;
    // Zooming loads new data, because the data of the whole range is downsampled.
    this.plot.on("plotly_relayout", (change) => {
      const axis = ["xaxis", "xaxis2"].find((name) => `${name}.range[0]` in change || `${name}.autorange` in change);
      if (!axis || this.loading) return;
      const zoom = change[`${axis}.autorange`] ? null : [change[`${axis}.range[0]`], change[`${axis}.range[1]`]].map(Number);
      const scaled = [...document.querySelectorAll(`form[data-controls~="${this.element.id}"] [name="x"]:checked`)];
      if (scaled.some((field) => field.value !== "step")) return;
      this.zoom = zoom && zoom.every(Number.isFinite) ? zoom : null;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), 250);
    });
  }

  show(state, text = "") {
    this.element.dataset.state = state;
    this.element.setAttribute("aria-busy", String(state === "loading"));
    if (state === "empty") {
      const line = document.createElement("p");
      line.textContent = text;
      this.state.replaceChildren(line);
    }
  }

  fail(error) {
    const line = document.createElement("p");
    line.textContent = `Cannot load the chart: ${error.message}.`;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "button button--small";
    button.textContent = "Try again";
    button.addEventListener("click", () => this.load());
    this.state.replaceChildren(line, button);
    this.element.dataset.state = "error";
    this.element.setAttribute("aria-busy", "false");
    this.isDue = true;
  }
}

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
    if (event.target.name === "x") figure.zoom = null;
    figure.refresh();
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
document.addEventListener("fp8:theme", () => figures.forEach((figure) => figure.refresh()));
document.addEventListener("fp8:change", (event) => {
  for (const [element, figure] of figures) {
    const kinds = (element.dataset.on || "").split(" ");
    if (event.detail.all || kinds.some((kind) => event.detail.kinds.has(kind))) figure.refresh();
  }
});
document.addEventListener("htmx:afterSettle", scan);
scan();
