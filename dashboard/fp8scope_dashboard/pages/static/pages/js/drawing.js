// Draws charts with plotly: loads it after the first paint, draws one chart at a time, and shortens names that leave the chart.

export const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: false,
  showTips: false,
  // The figure itself shows all steps after a double click, because it requests other data.
  doubleClick: false,
  // Plotly can upload charts to its vendor's cloud.
  showSendToCloud: false,
  plotlyServerURL: "",
  topojsonURL: "",
};

// Plotly is large: it runs after the first paint. A frame that was requested is painted when a timer in it fires.
const painted = new Promise((resolve) => {
  requestAnimationFrame(() => setTimeout(resolve));
  // No frames are painted in a hidden tab.
  setTimeout(resolve, 500);
});

// As a module, because those are compiled when they are preloaded. It defines window.Plotly.
let plotlyModule = null;
let attempts = 0;
export const loadPlotly = () => {
  plotlyModule ??= painted.then(async () => {
    const { content } = document.querySelector("meta[name='plotly']");
    try {
      // Browsers remember an address that failed.
      await import(attempts ? `${content}?again=${attempts}` : content);
      return window.Plotly;
    } catch {
      attempts += 1;
      plotlyModule = null;
      throw new Error("the chart script did not load");
    }
  });
  return plotlyModule;
};

// One chart is drawn at a time, the upper ones first, with a pause for input and painting between two.
const waiting = [];
let isDrawing = false;
const drawNext = async () => {
  if (isDrawing || !waiting.length) return;
  isDrawing = true;
  waiting.sort((a, b) => (a.element.compareDocumentPosition(b.element) & Node.DOCUMENT_POSITION_PRECEDING ? 1 : -1));
  const { draw, resolve, reject } = waiting.shift();
  await draw().then(resolve, reject);
  await new Promise((done) => { setTimeout(done); });
  isDrawing = false;
  drawNext();
};
export const turn = (element, draw) => new Promise((resolve, reject) => {
  waiting.push({ element, draw, resolve, reject });
  drawNext();
});

// The room of an entry of the legend beside its line, in pixels, and that of a letter.
const [LEGEND_LINE, LETTER] = [110, 6.6];

// Names that leave the chart are shortened in the middle: their start and their end tell runs apart. Escaped
// characters stay whole.
const shortened = (name, most) => {
  const letters = name.match(/&\w+;|./gsu) ?? [];
  if (letters.length <= most) return name;
  const head = Math.floor((most - 1) / 3);
  return `${letters.slice(0, head).join("")}…${letters.slice(letters.length - (most - 1 - head)).join("")}`;
};

export const shortenNames = (traces, width) => {
  const most = Math.max(16, Math.floor((width - LEGEND_LINE) / LETTER));
  for (const trace of traces) if (trace.name) trace.name = shortened(trace.name, most);
};
