// Suggestions for the search of runs: a list box that is worked with arrow keys, Enter, Tab and Escape.
//
//   <input role="combobox" aria-controls="LIST" data-suggest="ADDRESS"><ul id="LIST" role="listbox" hidden>

const DELAY = 120;

class Suggestions {
  constructor(input) {
    this.input = input;
    this.list = document.getElementById(input.getAttribute("aria-controls"));
    this.entries = [];
    this.current = -1;
    this.timer = null;
    this.asked = 0;
    input.addEventListener("input", (event) => { if (event.isTrusted) this.later(); });
    input.addEventListener("keydown", (event) => this.onKey(event));
    input.addEventListener("blur", () => setTimeout(() => this.close(), 150));
    this.list.addEventListener("mousedown", (event) => {
      const option = event.target.closest("[role=option]");
      if (!option) return;
      event.preventDefault();
      this.take([...this.list.children].indexOf(option));
    });
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), DELAY);
  }

  async ask() {
    const asked = ++this.asked;
    // Suggestions complete the text before the cursor, and only at the end of a term.
    const end = this.input.selectionStart ?? this.input.value.length;
    const text = this.input.value.slice(0, end);
    if (!text.trim() || /^\S/.test(this.input.value.slice(end))) { this.close(); return; }
    try {
      const url = new URL(this.input.dataset.suggest, location.href);
      url.searchParams.set("q", text);
      const answer = await fetch(url, { headers: { Accept: "application/json" } });
      if (!answer.ok || answer.redirected || asked !== this.asked) return;
      this.rest = this.input.value.slice(end);
      this.show((await answer.json()).suggestions);
    } catch {
      // Without suggestions the search still works.
      this.close();
    }
  }

  show(entries) {
    if (document.activeElement !== this.input) return;
    this.entries = entries;
    this.current = -1;
    this.list.replaceChildren(...entries.map((entry, i) => {
      const option = document.createElement("li");
      option.id = `${this.list.id}-${i}`;
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      const label = document.createElement("code");
      label.textContent = entry.label;
      const note = document.createElement("span");
      note.className = "muted";
      note.textContent = entry.note;
      option.append(label, note);
      return option;
    }));
    this.list.hidden = !entries.length;
    this.input.setAttribute("aria-expanded", String(entries.length > 0));
    this.input.removeAttribute("aria-activedescendant");
  }

  close() {
    clearTimeout(this.timer);
    this.asked += 1;
    this.show([]);
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }

  move(by) {
    const count = this.entries.length;
    this.current = (this.current + by + count + (this.current < 0 && by < 0 ? 1 : 0)) % count;
    [...this.list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === this.current)));
    const option = this.list.children[this.current];
    option.scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", option.id);
  }

  take(index) {
    const entry = this.entries[index];
    this.input.value = entry.text + (this.rest ?? "").trimStart();
    this.input.setSelectionRange(entry.text.length, entry.text.length);
    this.close();
    this.input.dispatchEvent(new Event("input", { bubbles: true }));
    // A field without a value yet goes on with its values.
    if (entry.text.endsWith(":")) this.later();
  }

  onKey(event) {
    const isOpen = !this.list.hidden && this.entries.length > 0;
    if (event.key === "Escape" && isOpen) { this.close(); event.preventDefault(); event.stopPropagation(); return; }
    if (!isOpen) return;
    if (event.key === "ArrowDown") this.move(1);
    else if (event.key === "ArrowUp") this.move(-1);
    else if ((event.key === "Enter" || event.key === "Tab") && this.current >= 0) this.take(this.current);
    else if (event.key === "Enter") { this.close(); return; }
    else return;
    event.preventDefault();
  }
}

const known = new WeakSet();
const scan = () => {
  for (const input of document.querySelectorAll("[data-suggest]")) {
    if (known.has(input)) continue;
    known.add(input);
    new Suggestions(input);
  }
};
document.addEventListener("htmx:afterSettle", scan);
scan();

// Names for plain fields, loaded when one is first used.
document.addEventListener("input", async (event) => {
  const field = event.target.closest?.("[data-keys]");
  if (!field) return;
  try {
    const url = new URL(field.dataset.keys, location.href);
    url.searchParams.set("q", field.value);
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    if (!answer.ok || answer.redirected) return;
    const { suggestions } = await answer.json();
    field.list?.replaceChildren(...suggestions.map(({ text }) => new Option(text, text)));
  } catch { /* The name can still be typed. */ }
});
