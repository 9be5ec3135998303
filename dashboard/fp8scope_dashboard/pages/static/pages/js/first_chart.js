// Lets the page's first chart be drawn before everything that can wait.

const PATIENCE = 5000;

const element = document.querySelector(".figure[data-state=drawn]");

// Fulfilled when the first chart is drawn or has failed, and at once on a page that brings none.
export const firstChart = new Promise((resolve) => {
  const look = () => {
    if (element?.dataset.state !== "drawn" || "stale" in element.dataset) resolve();
  };
  look();
  if (!element) return;
  new MutationObserver(look).observe(element, { attributes: true, attributeFilter: ["data-state", "data-stale"] });
  setTimeout(resolve, PATIENCE);
});
