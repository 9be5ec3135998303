// Runs before the first paint, so that the page does not flash in the wrong colours.
(() => {
  const key = "fp8scope-theme";
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  const stored = () => {
    try { return localStorage.getItem(key) || "auto"; } catch { return "auto"; }
  };
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  // The server draws the first chart of a page in these colours. If it does not know them, the chart is asked for again.
  const tell = () => {
    const theme = stored() === "auto" ? (isDark.matches ? "dark" : "light") : stored();
    const cookie = `${key}=${theme}`;
    if (!document.cookie.split("; ").includes(cookie)) document.cookie = `${cookie}; path=/; max-age=31536000; samesite=lax`;
  };
  const apply = (choice) => {
    if (choice === "auto") delete root.dataset.theme; else root.dataset.theme = choice;
    const button = document.querySelector("[data-theme-toggle]");
    if (button) {
      button.dataset.choice = choice;
      button.setAttribute("aria-label", `Theme: ${choice === "auto" ? "system" : choice}. Change.`);
      button.title = `Theme: ${choice === "auto" ? "system" : choice}`;
    }
  };
  const changed = () => document.dispatchEvent(new CustomEvent("fp8:theme"));

  apply(stored());
  tell();
  document.addEventListener("fp8:theme", tell);
  isDark.addEventListener("change", () => {
    if (stored() === "auto") changed();
  });
  addEventListener("DOMContentLoaded", () => {
    apply(stored());
    document.querySelector("[data-theme-toggle]")?.addEventListener("click", () => {
      const next = order[(order.indexOf(stored()) + 1) % order.length];
      try { localStorage.setItem(key, next); } catch { /* private window: applies to this page only */ }
      apply(next);
      changed();
    });
  });
})();
