// A table that sorts, searches, turns pages and opens its rows; usable by keyboard alone.

const tables = [];

class Table {
  // columns: {title, value(row) to sort by, show(row), number, css, help}; the first one holds the button that opens a row.
  constructor({ name, caption, columns, rows, text, open, sort = 0, size = 25, paper = [25, 0] }) {
    Object.assign(this, { name, columns, rows, text, open, size, paper });
    this.sort = { column: sort, down: true };
    this.page = 0;
    this.opened = new Set();
    this.query = "";
    this.count = el("span", { class: "soft", role: "status" });
    this.search = el("input", {
      type: "search", placeholder: "Search  ( / )", "aria-label": `Search ${name}`, spellcheck: "false",
      on: { input: () => { this.query = this.search.value; this.page = 0; this.update(); }, keydown: (event) => this.inSearch(event) },
    });
    this.before = el("button", { type: "button", "aria-label": `Previous page of ${name}`, on: { click: () => this.turn(-1) } }, "‹");
    this.after = el("button", { type: "button", "aria-label": `Next page of ${name}`, on: { click: () => this.turn(1) } }, "›");
    this.heads = columns.map((column, index) => el("th", { scope: "col", class: css(column), title: column.help },
      column.value ? el("button", { type: "button", on: { click: () => this.order(index) } }, column.title) : column.title));
    this.body = el("tbody", { class: "rows", on: { keydown: (event) => this.inRows(event) } });
    this.element = el("div", { class: "table" },
      el("div", { class: "bar" }, text ? this.search : null, this.count, el("span", { class: "fill" }), this.before, this.after),
      el("div", { class: "scroll" }, el("table", null, caption ? el("caption", null, caption) : null,
        el("thead", null, el("tr", null, this.heads)), this.body)));
    this.printNote = el("p", { class: "soft small", hidden: true });
    this.element.append(this.printNote);
    tables.push(this);
    this.texts = null;
    this.update();
  }

  chosen() {
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && !this.texts) this.texts = new Map(this.rows.map((row) => [row, this.text(row).toLowerCase()]));
    const found = words.length ? this.rows.filter((row) => words.every((word) => this.texts.get(row).includes(word))) : [...this.rows];
    const value = this.columns[this.sort.column].value;
    const sign = this.sort.down ? -1 : 1;
    const rank = (item) => (known(item) && item !== "" ? 0 : 1); // what is missing goes last, either way
    return found.sort((a, b) => {
      const x = value(a), y = value(b);
      return rank(x) - rank(y) || (x < y ? -sign : x > y ? sign : 0);
    });
  }

  update() {
    this.shown = this.chosen();
    this.page = Math.max(0, Math.min(this.page, Math.ceil(this.shown.length / this.size) - 1));
    this.heads.forEach((head, index) => {
      if (index === this.sort.column) head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const first = this.page * this.size, last = Math.min(first + this.size, this.shown.length);
    this.count.textContent = !this.shown.length ? "nothing found"
      : this.shown.length <= this.size ? count(this.shown.length, "row")
      : `${first + 1}–${last} of ${this.shown.length.toLocaleString("en")}`;
    this.before.disabled = first === 0;
    this.after.disabled = last >= this.shown.length;
    this.before.hidden = this.after.hidden = this.shown.length <= this.size;
    this.draw(this.shown.slice(first, last));
  }

  draw(rows) {
    this.body.replaceChildren();
    for (const row of rows) {
      this.body.append(this.rowOf(row));
      if (this.opened.has(row)) this.body.append(this.detailOf(row));
    }
    const first = this.body.querySelector("button.open");
    if (first) first.tabIndex = 0;
  }

  rowOf(row) {
    const cells = this.columns.map((column, index) => {
      const content = column.show(row);
      if (index || !this.open) return el("td", { class: css(column) }, content);
      const button = el("button", { type: "button", class: "open", tabindex: "-1", "aria-expanded": String(this.opened.has(row)) }, content);
      return el("td", { class: css(column) }, button);
    });
    const line = el("tr", { on: { click: (event) => {
      if (!this.open || event.target.closest("a, td button:not(.open)") || getSelection().type === "Range") return;
      this.toggle(row);
    } } }, cells);
    line.row = row;
    return line;
  }

  detailOf(row) {
    return el("tr", { class: "opened" }, el("td", { colspan: this.columns.length }, this.open(row)));
  }

  toggle(row) {
    const line = [...this.body.children].find((child) => child.row === row);
    const isOpen = this.opened.has(row);
    if (isOpen) { this.opened.delete(row); line.nextSibling.remove(); }
    else { this.opened.add(row); line.after(this.detailOf(row)); }
    line.querySelector("button.open").setAttribute("aria-expanded", String(!isOpen));
    return line;
  }

  order(index) {
    const down = this.sort.column === index ? !this.sort.down : Boolean(this.columns[index].number);
    this.sort = { column: index, down };
    this.page = 0;
    this.update();
  }

  turn(by) {
    this.page += by;
    this.update();
  }

  focus(button) {
    if (!button) return;
    for (const other of this.body.querySelectorAll('button.open[tabindex="0"]')) other.tabIndex = -1;
    button.tabIndex = 0;
    button.focus();
  }

  inSearch(event) {
    if (event.key === "ArrowDown") this.focus(this.body.querySelector("button.open"));
    else if (event.key === "Escape" && this.search.value) { this.search.value = this.query = ""; this.page = 0; this.update(); event.stopPropagation(); }
    else return;
    event.preventDefault();
  }

  inRows(event) {
    const button = event.target.closest("button.open");
    if (!button) {
      const detail = event.target.closest("tr.opened");
      if (event.key === "Escape" && detail) { this.focus(this.toggle(detail.previousSibling.row).querySelector("button.open")); event.preventDefault(); event.stopPropagation(); }
      return;
    }
    const buttons = [...this.body.querySelectorAll(":scope > tr > td:first-child > button.open")];
    const at = buttons.indexOf(button), row = button.closest("tr").row;
    if (event.key === "ArrowDown") this.focus(buttons[at + 1]);
    else if (event.key === "ArrowUp") { if (at) this.focus(buttons[at - 1]); else this.search.focus(); }
    else if (event.key === "Home") this.focus(buttons[0]);
    else if (event.key === "End") this.focus(buttons[buttons.length - 1]);
    else if (event.key === "PageDown" && !this.after.disabled) { this.turn(1); this.focus(this.body.querySelector("button.open")); }
    else if (event.key === "PageUp" && !this.before.disabled) { this.turn(-1); this.focus(this.body.querySelector("button.open")); }
    else if (event.key === "ArrowRight" && !this.opened.has(row)) this.toggle(row);
    else if ((event.key === "ArrowLeft" || event.key === "Escape") && this.opened.has(row)) { this.toggle(row); event.stopPropagation(); }
    else return;
    event.preventDefault();
  }

  // On paper: as many rows as `paper` says, and as many of them open.
  print() {
    const rows = this.shown.slice(0, this.paper[0]);
    const before = this.opened;
    if (this.open) this.opened = new Set([...before, ...rows.slice(0, this.paper[1])]);
    this.draw(rows);
    this.opened = before;
    this.printNote.hidden = this.shown.length <= rows.length;
    this.printNote.textContent = `${this.shown.length - rows.length} more rows are in the file.`;
  }

  printed() {
    this.printNote.hidden = true;
    this.update();
  }
}

const css = (column) => [column.number ? "number" : "", column.css || ""].join(" ").trim() || null;
