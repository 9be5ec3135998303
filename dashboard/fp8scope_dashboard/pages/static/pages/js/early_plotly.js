// Runs plotly as soon as the chart that the page brings is painted. The modules, which need it, run a little later.

(() => {
  const { plotly } = document.currentScript.dataset;
  const observer = new MutationObserver(() => {
    if (!document.querySelector(".figure__drawn")) return;
    observer.disconnect();
    // A frame that was requested is painted when a timer in it fires. figure.js reports a failure.
    requestAnimationFrame(() => setTimeout(() => import(plotly).catch(() => {})));
  });
  observer.observe(document, { subtree: true, childList: true });
})();
