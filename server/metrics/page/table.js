// A table whose rows are kept from one report to the next. A column is [title, classes, cell]. `cell` makes of an item
// and the context of all what the cell shows: a text, {text, tone, title}, or a function that draws into the cell. The
// first column names the row.
class Table {
  constructor(place, columns) {
    this.columns = columns;
    this.head = element("tr");
    this.body = element("tbody");
    for (const [title, classes] of columns) {
      const cell = element("th", classes, title);
      cell.scope = "col";
      this.head.append(cell);
    }
    place.append(append(element("table"), append(element("thead"), this.head), this.body));
  }

  show(items, keyOf, context) {
    keepChildren(this.body, items, keyOf, () => this.#makeRow(), (row, item) => {
      this.columns.forEach(([, classes, cell], index) => updateCell(row.cells[index], classes, cell(item, context)));
    });
  }

  #makeRow() {
    const row = element("tr");
    this.columns.forEach((_, index) => row.append(element(index === 0 ? "th" : "td")));
    row.firstChild.scope = "row";
    return row;
  }
}

function updateCell(node, classes, shown) {
  if (typeof shown === "function") {
    setClass(node, classes);
    shown(node);
    return;
  }
  const {text, tone = "", title = ""} = typeof shown === "string" ? {text: shown} : shown;
  setClass(node, `${classes} ${tone}`.trim());
  setTitle(node, title);
  setText(node, text);
}
