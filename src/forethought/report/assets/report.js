"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const byId = (id) => document.getElementById(id);
  const make = (tag, cls, text) => {
    const node = document.createElement(tag);
    if (cls) node.className = cls;
    if (text !== undefined) node.textContent = text; // text of a model is never markup
    return node;
  };
  const data = (id) => JSON.parse(byId(id).textContent);
  const count = (value) => value.toLocaleString("en-US");
  const show = (value, percent) => {
    if (value === null || value === undefined) return "–";
    if (percent) return (100 * value).toFixed(1) + "%";
    if (Number.isInteger(value)) return count(value);
    const size = Math.abs(value);
    if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
    if (size >= 1000) return count(Math.round(value));
    return size < 0.1 ? String(+value.toPrecision(3)) : value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  };

  // One of several blocks at a time, chosen by a select. Without a script all of them are shown.
  const choose = (id, then) => {
    const select = byId(id);
    if (!select) return;
    const change = () => {
      for (const option of select.options) byId(option.value).hidden = option.value !== select.value;
      if (then) then(byId(select.value));
    };
    select.addEventListener("change", change);
    change();
  };

  choose("pick-view");

  // Curves: values of a step under the pointer or by arrow keys, arms on and off.
  choose("pick-curve");
  const curves = byId("curve-data") ? data("curve-data") : [];
  all("figure[id^=curve-]").forEach((figure, place) => {
    const arms = curves[place], percent = figure.dataset.percent === "1";
    const plot = figure.querySelector(".plot"), cursor = figure.querySelector(".cursor"), at = figure.querySelector(".at");
    const lo = +plot.dataset.lo, hi = +plot.dataset.hi;
    const steps = [...new Set(Object.values(arms).flatMap(([s]) => s))].sort((a, b) => a - b);
    let current = steps.length - 1;
    const nearest = (list, step) => {
      let best = 0;
      list.forEach((s, i) => { if (Math.abs(s - step) < Math.abs(list[best] - step)) best = i; });
      return best;
    };
    const read = (which) => {
      current = Math.max(0, Math.min(steps.length - 1, which));
      const x = (1 + 98 * (steps[current] - lo) / (hi - lo)).toFixed(2) + "%";
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.classList.add("on");
      at.textContent = "step " + count(steps[current]);
      for (const button of all(".legend button", figure)) {
        const [s, means] = arms[button.dataset.arm];
        button.querySelector(".num").textContent = show(means[nearest(s, steps[current])], percent);
      }
    };
    const leave = () => {
      read(steps.length - 1);
      cursor.classList.remove("on");
      at.textContent = "last step";
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      read(nearest(steps, lo + (hi - lo) * ((event.clientX - box.left) / box.width - 0.01) / 0.98));
    });
    plot.addEventListener("pointerleave", leave);
    plot.addEventListener("blur", leave);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (!move) return;
      event.preventDefault();
      read(current + move);
    });
    for (const button of all(".legend button", figure)) {
      button.addEventListener("click", () => {
        const off = button.getAttribute("aria-pressed") === "true";
        for (const other of all(`.legend button[data-arm="${button.dataset.arm}"]`)) other.setAttribute("aria-pressed", String(!off));
        for (const group of all(`g[data-arm="${button.dataset.arm}"]`)) group.classList.toggle("off", off);
      });
    }
  });

  // Rollouts: the numbers of a token.
  const panels = byId("panels"), readout = byId("readout");
  if (panels) {
    choose("pick-tree", (panel) => {
      all(".signal-name").forEach((node) => { node.textContent = panel.dataset.signal; });
    });
    for (const radio of all("input[name=colour]")) {
      radio.addEventListener("change", () => { if (radio.checked) panels.dataset.colour = radio.value; });
    }
    let marked = null;
    const mark = (token) => {
      if (marked) marked.classList.remove("on");
      marked = token;
      readout.hidden = !token;
      if (!token) return;
      token.classList.add("on");
      const [place, id, logprob, advantage] = token.dataset.v.split(" ");
      const chance = logprob === "-" ? "" : ` (p ${show(Math.exp(+logprob))})`;
      readout.replaceChildren(
        `token ${place}  `, make("b", "", JSON.stringify(token.textContent.replace("↵\n", "\n"))),
        `  id ${id} · log-prob ${logprob === "-" ? "–" : logprob}${chance} · advantage ${advantage === "-" ? "–" : advantage}`,
      );
    };
    panels.addEventListener("pointerover", (event) => mark(event.target.closest(".t")));
    panels.addEventListener("pointerleave", () => mark(null));
    panels.addEventListener("click", (event) => { const token = event.target.closest(".t"); if (token) mark(token); });
    panels.addEventListener("focusout", () => mark(null));
    panels.addEventListener("focusin", (event) => {
      if (event.target.matches(".toks:focus-visible")) mark(event.target.querySelector(".t"));
    });
    panels.addEventListener("keydown", (event) => {
      if (!event.target.matches(".toks")) return;
      const tokens = all(".t", event.target), move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") mark(null);
      if (!move || !tokens.length) return;
      event.preventDefault();
      const now = tokens.indexOf(marked);
      mark(tokens[Math.max(0, Math.min(tokens.length - 1, now < 0 ? 0 : now + move))]);
    });
  }

  // The tree: nodes are made when their parent is opened, and only so many at a time.
  const STEP = 40;
  const plant = (box) => {
    const tree = data(box.dataset.source);
    const children = tree.id.map(() => []);
    tree.parent.forEach((parent, i) => { if (parent >= 0) children[parent].push(i); });
    const fact = (line, name, value) => {
      if (value === null || value === "" || value === undefined) return;
      const item = make("span", "", name + " ");
      item.append(make("b", "", typeof value === "number" ? show(value) : value));
      line.append(item);
    };
    const fill = (list, items, from) => {
      items.slice(from, from + STEP).forEach((i) => list.append(node(i)));
      const left = items.length - from - STEP;
      if (left <= 0) return;
      const item = make("li"), button = make("button", "more", `show ${count(Math.min(left, STEP))} more of ${count(left)}`);
      button.type = "button";
      button.addEventListener("click", () => { item.remove(); fill(list, items, from + STEP); });
      item.append(button);
      list.append(item);
    };
    const node = (i) => {
      const item = make("li"), row = make("div", "node"), body = make("div"), line = make("div", "line1");
      row.dataset.node = tree.id[i];
      line.append(make("span", "k", tree.kind[i] + (tree.sampled[i] ? ", sampled" : "")));
      fact(line, "reward", tree.reward[i]);
      fact(line, "value", tree.value[i]);
      if (tree.visits[i]) fact(line, "visits", tree.visits[i]);
      fact(line, "prior", tree.prior[i]);
      fact(line, "tokens", tree.tokens[i]);
      if (tree.stop[i] !== "none") fact(line, "stop", tree.stop[i]);
      if (children[i].length) fact(line, "children", children[i].length + tree.hidden[i]);
      body.append(line);
      const [text, hidden, hiddenTokens] = tree.text[i];
      if (text) {
        const says = make("div", "says", text);
        if (hidden || hiddenTokens) says.append(make("span", "cut", ` (${count(hidden)} characters${hiddenTokens ? ` and ${count(hiddenTokens)} tokens` : ""} not shown)`));
        body.append(says);
      }
      if (tree.meta[i]) body.append(make("div", "meta", tree.meta[i]));
      item.append(row);
      if (children[i].length) {
        const button = make("button", "", "+"), list = make("ul");
        button.type = "button";
        button.setAttribute("aria-expanded", "false");
        button.setAttribute("aria-label", `children of node ${tree.id[i]}`);
        list.hidden = true;
        const open = () => {
          const now = list.hidden;
          if (now && !list.childElementCount) {
            fill(list, children[i], 0);
            if (tree.hidden[i]) list.append(make("li", "note", `${count(tree.hidden[i])} more children are not on this page`));
          }
          list.hidden = !now;
          button.textContent = now ? "–" : "+";
          button.setAttribute("aria-expanded", String(now));
        };
        button.addEventListener("click", open);
        row.append(button);
        item.append(list);
        if (i === 0) open();
      } else {
        row.append(make("span", "bare", "·"));
        if (tree.hidden[i]) fact(line, "children not on this page", tree.hidden[i]);
      }
      row.append(body);
      return item;
    };
    const top = make("ul");
    top.append(node(0));
    box.replaceChildren(top);
    if (tree.id.length < tree.all) box.prepend(make("p", "note", `${count(tree.id.length)} of ${count(tree.all)} nodes are on this page: the most visited, then the nearest to the root.`));
  };
  for (const details of all(".treebox")) {
    details.addEventListener("toggle", () => {
      const box = details.querySelector(".tree");
      if (details.open && !box.dataset.planted) { box.dataset.planted = "1"; plant(box); }
    });
  }
  document.documentElement.dataset.ready = "1";
})();
