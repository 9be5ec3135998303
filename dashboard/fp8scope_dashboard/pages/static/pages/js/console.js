// The console log follows its end while it is scrolled there, and shows a marked line in the middle.

const END = 24;
let follows = true;

const box = () => document.querySelector(".console");

const place = () => {
  const log = box();
  if (!log) return;
  const marked = log.querySelector("[aria-current]");
  if (marked) marked.scrollIntoView({ block: "center" });
  else if ("follow" in log.dataset && follows) log.scrollTop = log.scrollHeight;
};

let kept = 0;
document.addEventListener("htmx:beforeSwap", (event) => {
  const log = box();
  if (!log || event.detail.target?.id !== "console-lines") {
    follows = true;
    return;
  }
  kept = log.scrollTop;
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < END;
});
document.addEventListener("htmx:afterSettle", () => {
  place();
  if (!follows && box()) box().scrollTop = kept;
});
place();
