// The account page: the theme and the time zone of this browser.

const KEY = "fp8scope-theme";
const choices = document.querySelector("[data-theme-choice]");
let chosen = "auto";
try { chosen = localStorage.getItem(KEY) || "auto"; } catch { /* private window: the choice is not kept */ }
choices.disabled = false;
choices.querySelector(`input[value="${CSS.escape(chosen)}"]`)?.click();
choices.addEventListener("change", (event) => {
  const choice = event.target.value;
  try { localStorage.setItem(KEY, choice); } catch { /* as above */ }
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  document.dispatchEvent(new CustomEvent("fp8:theme"));
});

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
const offer = document.querySelector("[data-browser-zone]");
if (zone && offer) {
  const button = offer.querySelector("button");
  button.textContent = zone;
  button.addEventListener("click", () => { document.querySelector('input[name="time_zone"]').value = zone; });
  offer.hidden = false;
}
