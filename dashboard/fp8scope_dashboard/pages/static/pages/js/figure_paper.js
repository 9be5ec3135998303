// Charts on paper and in files. figure.js draws them.

// On paper charts are as wide as the page. Plotly gives their pictures a size in pixels; that of a wide screen would make
// their texts too small.
const MAX_PRINTED_WIDTH = 900;
const fitted = new Set();
const narrowed = new Set();
addEventListener("beforeprint", () => {
  for (const plot of document.querySelectorAll(".figure[data-state=ready] .figure__plot")) {
    if (!(plot._fullLayout?.width > MAX_PRINTED_WIDTH)) continue;
    window.Plotly.relayout(plot, { autosize: false, width: MAX_PRINTED_WIDTH });
    narrowed.add(plot);
  }
  for (const picture of document.querySelectorAll(".figure__plot .main-svg:not([viewBox])")) {
    const { width: { baseVal: { value: width } }, height: { baseVal: { value: height } } } = picture;
    if (!width || !height) continue;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    fitted.add(picture);
  }
});
addEventListener("afterprint", () => {
  for (const picture of fitted) picture.removeAttribute("viewBox");
  fitted.clear();
  for (const plot of narrowed) window.Plotly.relayout(plot, { autosize: true, width: null });
  narrowed.clear();
});

// Save as PNG or SVG what is shown, with the chart's title.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-save]");
  if (!button) return;
  const element = button.closest(".figure");
  const plot = element.querySelector(".figure__plot");
  button.closest("details").open = false;
  if (!plot?._fullLayout) return;
  const style = getComputedStyle(document.documentElement);
  const layout = {
    ...plot.layout,
    paper_bgcolor: style.getPropertyValue("--surface").trim() ? getComputedStyle(element.closest(".card") ?? document.body).backgroundColor : "white",
    title: { text: element.dataset.title || "", x: 0, xref: "paper", y: 0.985, yanchor: "top", font: { size: 15 } },
    margin: { ...plot.layout.margin, t: (plot.layout.margin?.t ?? 26) + 30 },
  };
  const size = { width: plot.clientWidth, height: plot.clientHeight + 30 };
  await window.Plotly.downloadImage({ data: plot.data, layout }, {
    format: button.dataset.save, filename: element.dataset.file || element.id, scale: button.dataset.save === "png" ? 2 : 1, ...size,
  });
});
