"use strict";
// Tables are sorted by a click on the head of a column, and by another in the opposite order. On a narrow screen, where a
// table of numbers has no head, a list of its columns does the same.
const sortTables = (() => {
  const INTERVAL = /interval ([+-]?[\d.,e+-]+)%? to ([+-]?[\d.,e+-]+)/;
  const number = (text) => Number(text.replaceAll(",", ""));

  // A number if there is one: that of `data-sort`, the first in the text, or the middle of an interval.
  function valueOf(cell) {
    if (cell.dataset.sort !== undefined) return cell.dataset.sort === "" ? null : Number(cell.dataset.sort);
    const text = [...cell.childNodes].filter((node) => node.className !== "mark").map((node) => node.textContent).join("").trim();
    if (text === "baseline") return 0;
    const first = text.match(/^[+-]?[\d,]*\.?\d+(e[+-]?\d+)?/);
    if (first) return number(first[0]);
    const ends = text.match(INTERVAL);
    if (ends) return (number(ends[1]) + number(ends[2])) / 2;
    return /^.?$/u.test(text) ? null : text.toLowerCase(); // a dash is no value
  }

  function compare(one, other, sign) {
    if (one === null || other === null) return (one === null) - (other === null); // rows without a value come last
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    return sign * (typeof one === "number" ? one - other : one.localeCompare(other));
  }

  function prepare(table, name) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    let order = { column: -1, falls: false };

    function sort(column, falls) {
      order = { column, falls };
      const values = new Map(rows.map((row) => [row, column < 0 ? 0 : valueOf(row.cells[column])]));
      body.append(...rows.toSorted((one, other) => compare(values.get(one), values.get(other), falls ? -1 : 1)));
      heads.forEach((head, place) => {
        head.ariaSort = place === column ? (falls ? "descending" : "ascending") : null;
      });
      picker.value = String(column);
    }

    function choose(column) {
      sort(column, column === order.column && !order.falls);
      const others = pageState.all("sort").filter((one) => !one.startsWith(`${name}.`));
      pageState.set("sort", [...others, ...(column < 0 ? [] : [`${name}.${column}.${order.falls ? "falling" : "rising"}`])]);
    }

    const label = document.createElement("label");
    label.className = "sorter";
    const picker = document.createElement("select");
    picker.autocomplete = "off";
    picker.add(new Option("as given", "-1"));
    label.append("sort by ", picker);
    heads.forEach((head, column) => {
      picker.add(new Option(head.firstChild.textContent.trim(), String(column)));
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => choose(column));
    });
    picker.addEventListener("change", () => choose(Number(picker.value)));
    if (!table.classList.contains("strip")) table.before(label);

    return () => {
      const [, column, direction] = pageState.all("sort").map((one) => one.split(".")).find(([own]) => own === name) ?? [];
      if (column === undefined && order.column < 0) return; // the rows have their first order
      sort(heads[column] ? Number(column) : -1, direction === "falling");
    };
  }

  const tables = [...document.querySelectorAll("table")].filter((table) => table.tBodies[0]?.rows.length > 1);
  const restores = tables.map((table, place) => prepare(table, table.id || String(place)));
  return () => { for (const restore of restores) restore(); };
})();
sortTables();
pageState.changed(sortTables);
