// Every text of the daemon's reaches the page through these functions, which set textContent and attributes:
// names, reasons and events are written by strangers, and none is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function element(tag, classes = "", text = "") {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text) node.textContent = text;
  return node;
}

function svgElement(tag, classes = "") {
  const node = document.createElementNS(SVG, tag);
  if (classes) node.setAttribute("class", classes);
  return node;
}

function append(parent, ...children) {
  parent.append(...children);
  return parent;
}

// Writing only what is new keeps a selection of text, and saves the layout.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

function setAttributes(node, values) {
  for (const [name, value] of Object.entries(values)) setAttribute(node, name, value);
}

function setClass(node, classes) {
  if (node.className !== classes) node.className = classes;
}

function setTitle(node, text) {
  if (node.title !== text) node.title = text;
}

// Shows a text, or hides the element when there is none.
function showText(node, text) {
  setText(node, text);
  node.hidden = text === "";
}

const keptChildren = new WeakMap();

// Makes the children of `parent` those of `items`, in their order. Children are found again by their key, so focus,
// scroll position and selection stay.
function keepChildren(parent, items, keyOf, make, update) {
  const before = keptChildren.get(parent) ?? new Map();
  const kept = new Map();
  const focused = document.activeElement;
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (kept.has(key)) continue;
    const child = before.get(key) ?? make(item);
    kept.set(key, child);
    if (child === next) {
      next = next.nextSibling;
    } else {
      parent.insertBefore(child, next);
    }
    update(child, item);
  }
  while (next) {
    const last = next;
    next = next.nextSibling;
    last.remove();
  }
  keptChildren.set(parent, kept);
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({preventScroll: true});
}

// Makes a list of facts. A fact is [name, value, tone, title]; one without a value is left out.
function keepFacts(list, facts) {
  const shown = facts.filter(([, value]) => value !== "");
  keepChildren(list, shown, ([name]) => name, makeFact, (node, [name, value, tone = "", title = ""]) => {
    setText(node.firstChild, name);
    setText(node.lastChild, value);
    setClass(node.lastChild, tone);
    setTitle(node, title);
  });
}

function makeFact() {
  return append(element("div"), element("dt"), element("dd"));
}
