"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const charts = [];

  function element(name, text, attributes) {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }

  function swatch(colour) {
    const made = element("i", null, { class: "swatch" });
    made.style.background = colour;
    return made;
  }

  function colour(name) {
    return getComputedStyle(root).getPropertyValue(name).trim();
  }

  function size(bytes) {
    for (const [unit, of, decimals] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]])
      if (bytes >= of) return (bytes / of).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }) + " " + unit;
    return bytes + " B";
  }

  // -- light and dark --------------------------------------------------------------------------------------

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => charts.forEach((chart) => chart.redraw(false, true));
  prefersDark.addEventListener("change", redraw);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraw();
  });

  function axis(more) {
    return Object.assign({ stroke: () => colour("--faint"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { stroke: () => colour("--line"), width: 1 } }, more);
  }

  function widthOf(place) {
    return Math.max(240, place.clientWidth);
  }

  function fitted(chart, place, height) {
    charts.push(chart);
    new ResizeObserver(() => {
      const width = widthOf(place);
      if (width !== chart.width) chart.setSize({ width, height });
    }).observe(place);
  }

  function scaleOf(largest) {
    return largest >= 2 * 2 ** 30 ? { name: "GiB", bytes: 2 ** 30 } : { name: "MiB", bytes: 2 ** 20 };
  }

  // -- one iteration ---------------------------------------------------------------------------------------

  const PHASES = { f: ["forward", "#7aa6d8"], b: ["backward", "#d39a5b"], s: ["step", "#8f7cc8"], "-": ["", "transparent"] };

  function totals(stage) {
    return stage.at.map((_, at) => stage.by.reduce((sum, own) => sum + own[at], 0));
  }

  function where(stage, at) {
    const parts = [PHASES[stage.phases[at]][0]];
    if (stage.microbatch[at] >= 0) parts.push("micro-batch " + stage.microbatch[at]);
    return parts.filter(Boolean).join(" of ");
  }

  function readAt(stage, sums, at) {
    const place = document.getElementById("reading");
    const [name, module, shape] = data.tensors[stage.tensors[at]];
    const first = element("p");
    first.append(element("b", size(sums[at] * data.unit)), " of live tensors in " + (where(stage, at) || "the iteration") + ", event " + stage.at[at].toLocaleString("en") + " of " + stage.events.toLocaleString("en"));
    const second = element("p");
    second.append(element("b", name || "a tensor"), (module ? " in " + module : "") + (shape ? " " + shape : "") + (stage.begins[at] === "1" ? " begins" : " ends"));
    const list = element("ul");
    stage.categories.forEach((category, index) => {
      const bytes = stage.by[index][at] * data.unit;
      if (!bytes) return;
      const entry = element("li");
      entry.append(swatch(data.categories[category].colour), data.categories[category].label + " " + size(bytes));
      list.append(entry);
    });
    place.replaceChildren(first, second, list);
    place.dataset.event = stage.at[at];
  }

  function stacked(stage, unit) {
    const sums = stage.at.map(() => 0);
    const layers = stage.by.map((own) => own.map((part, at) => ((sums[at] += part) * data.unit) / unit.bytes));
    return layers.reverse();
  }

  let timeline = null;

  function drawTimeline(stage) {
    const place = document.getElementById("timeline");
    const sums = totals(stage);
    const top = sums.indexOf(Math.max(...sums));
    const unit = scaleOf(sums[top] * data.unit);
    const height = 320;
    const series = [...stage.categories].reverse().map((category) => {
      const fill = data.categories[category].colour;
      return { label: data.categories[category].label, fill, stroke: fill, width: 0, paths: uPlot.paths.stepped({ align: -1 }), points: { show: false } };
    });
    const limit = data.limit && sums[top] * data.unit > data.limit / 2 ? data.limit / unit.bytes : null;
    const ribbon = (chart) => {
      const { ctx, bbox } = chart;
      const ratio = devicePixelRatio || 1;
      ctx.save();
      let from = 0;
      for (let at = 1; at <= stage.at.length; at++) {
        if (at < stage.at.length && stage.phases[at] === stage.phases[from]) continue;
        const x0 = Math.max(bbox.left, chart.valToPos(from ? stage.at[from - 1] : 0, "x", true));
        const x1 = Math.min(bbox.left + bbox.width, chart.valToPos(stage.at[at - 1], "x", true));
        ctx.fillStyle = PHASES[stage.phases[from]][1];
        if (x1 > x0) ctx.fillRect(x0, bbox.top + bbox.height, x1 - x0, 5 * ratio);
        from = at;
      }
      if (limit) {
        const y = chart.valToPos(limit, "y", true);
        ctx.strokeStyle = colour("--bad");
        ctx.lineWidth = ratio;
        ctx.setLineDash([5 * ratio, 4 * ratio]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
      }
      ctx.restore();
    };
    const labels = (chart, splits) => splits.map((value) => {
      let at = stage.at.findIndex((event) => event >= value);
      if (at < 0) at = stage.at.length - 1;
      const mb = stage.microbatch[at];
      return mb >= 0 ? stage.phases[at].toUpperCase() + " " + mb : PHASES[stage.phases[at]][0];
    });
    const options = {
      width: widthOf(place),
      height,
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (chart, low, high) => [low, Math.max(high, low + 1)] }, y: { range: (chart, low, high) => [0, Math.max(high, limit || 0) * 1.05 || 1] } },
      axes: [axis({ values: labels, space: 64, size: 40, gap: 10 }), axis({ label: unit.name, size: 58, labelSize: 18 })],
      series: [{}, ...series],
      hooks: { draw: [ribbon], setCursor: [(chart) => { if (chart.cursor.idx !== null && chart.cursor.idx !== undefined) readAt(stage, sums, chart.cursor.idx); }] },
    };
    if (timeline) {
      charts.splice(charts.indexOf(timeline), 1);
      timeline.destroy();
    }
    place.replaceChildren();
    timeline = new uPlot(options, [stage.at, ...stacked(stage, unit)], place);
    fitted(timeline, place, height);
    place.tabIndex = 0;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", "Memory over one iteration, " + size(sums[top] * data.unit) + " at most; arrow keys read it");
    let at = top;
    place.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      event.preventDefault();
      at = Math.max(0, Math.min(stage.at.length - 1, at + step));
      timeline.setCursor({ left: timeline.valToPos(stage.at[at], "x"), top: 10 });
      readAt(stage, sums, at);
    };
    readAt(stage, sums, top);
    const count = stage.shown < stage.microbatches ? stage.shown.toLocaleString("en") + " of " + stage.microbatches.toLocaleString("en") + " micro-batches, the others do the same; " : "";
    document.getElementById("iteration").textContent = upper(stage.name) + ": live tensors (requested bytes) whenever one begins or ends; " + count + "F forward, B backward, with the micro-batch. Drag to zoom, double-click to go back.";
  }

  function counted(count, thing) {
    return count.toLocaleString("en") + " " + thing + (count === 1 ? "" : "s");
  }

  function nameCell(name) {
    const cell = element("td", null, { class: "name" });
    for (const piece of name.split(/(?<=[._])/)) cell.append(piece, element("wbr"));
    return cell;
  }

  function upper(text) {
    return text[0].toUpperCase() + text.slice(1);
  }

  function drawContents(stage) {
    const place = document.getElementById("contents");
    const note = document.getElementById("contents-of");
    const all = stage.contents.reduce((sum, row) => sum + row[1], 0);
    note.textContent = stage.contents.length ? upper(stage.name) + ": " + size(all) + " of live tensors when allocated bytes peak." : upper(stage.name) + ": its tensors are not known.";
    place.replaceChildren();
    stage.categories.concat().forEach((category) => {
      const rows = stage.contents.filter((row) => row[0] === category);
      if (!rows.length) return;
      const bytes = rows.reduce((sum, row) => sum + row[1], 0);
      const group = element("details");
      const summary = element("summary");
      summary.append(swatch(data.categories[category].colour), data.categories[category].label + ": " + size(bytes) + ", " + counted(rows.reduce((sum, row) => sum + row[2], 0), "tensor"));
      const table = element("table");
      const head = element("tr");
      for (const [name, figure] of [["tensor"], ["size", 1], ["tensors", 1], ["each", 1], ["shape"], ["modules"], ["batch"]]) head.append(element("th", name, figure ? { class: "figure" } : {}));
      const body = element("tbody");
      for (const [, size_, count, name, modules, microbatches, shape] of rows) {
        const row = element("tr");
        row.append(nameCell(name), element("td", size(size_), { class: "figure" }), element("td", count.toLocaleString("en"), { class: "figure" }), element("td", size(Math.round(size_ / count)), { class: "figure" }), element("td", shape), element("td", modules, { class: "wraps" }), element("td", microbatches, { class: "wraps" }));
        body.append(row);
      }
      const thead = element("thead");
      thead.append(head);
      table.append(thead, body);
      const scrolls = element("div", null, { class: "scrolls", tabindex: "0" });
      scrolls.append(table);
      group.append(summary, scrolls);
      place.append(group);
    });
    const largest = [...place.children].sort((one, other) => bytesOf(stage, other) - bytesOf(stage, one))[0];
    if (largest) largest.open = true;
  }

  function bytesOf(stage, group) {
    const label = group.firstChild.textContent.split(":")[0];
    return stage.contents.filter((row) => data.categories[row[0]].label === label).reduce((sum, row) => sum + row[1], 0);
  }

  function choose(at) {
    document.querySelectorAll("button.stage").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.stage) === at)));
    document.querySelectorAll(".of-stage").forEach((part) => (part.hidden = Number(part.dataset.stage) !== at));
    drawTimeline(data.stages[at]);
    drawContents(data.stages[at]);
  }

  if (data.stages && data.stages.length) {
    document.querySelectorAll("button.stage").forEach((button) => button.addEventListener("click", () => choose(Number(button.dataset.stage))));
    choose(data.first);
  }

  // -- memory against time ---------------------------------------------------------------------------------

  function drawFront(front) {
    const place = document.getElementById("front");
    const unit = scaleOf(Math.max(...front.points.map((point) => point.bytes)));
    const points = [...front.points].sort((one, other) => one.bytes - other.bytes);
    const open = (at) => {
      const layout = document.getElementById("layout-" + points[at].layout);
      layout.open = true;
      layout.scrollIntoView({ block: "nearest" });
      layout.firstChild.focus();
    };
    const height = 300;
    const marks = (chart) => {
      const { ctx } = chart;
      const ratio = devicePixelRatio || 1;
      points.forEach((point) => {
        const x = chart.valToPos(point.bytes / unit.bytes, "x", true);
        const y = chart.valToPos(point.seconds, "y", true);
        ctx.beginPath();
        ctx.arc(x, y, (point.kind === "front" ? 5 : 7) * ratio, 0, 2 * Math.PI);
        ctx.fillStyle = { front: "#4e8fce", recommended: "#2e8b57", given: "#e8a04c", over: "#c94f4f" }[point.kind];
        ctx.fill();
        ctx.fillStyle = colour("--ink");
        ctx.font = 12 * ratio + "px system-ui, sans-serif";
        ctx.fillText(point.name, x + 9 * ratio, y - 7 * ratio);
      });
    };
    const all = points.map((point) => point.seconds);
    const options = {
      width: widthOf(place),
      height,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false, range: (chart, low, high) => [low - (high - low || low) * 0.1, high + (high - low || high) * 0.18] }, y: { range: () => [Math.min(...all) * 0.95, Math.max(...all) * 1.08] } },
      axes: [axis({ label: unit.name + " of tensors on the fullest stage", labelSize: 18, space: 60 }), axis({ label: "step, s", size: 58, labelSize: 18 })],
      series: [{}, { stroke: "transparent", points: { show: false } }],
      hooks: {
        draw: [marks],
        setCursor: [(chart) => {
          const at = chart.cursor.idx;
          if (at === null || at === undefined) return;
          document.getElementById("front-reading").textContent = points[at].name + ": " + points[at].words;
        }],
      },
    };
    const chart = new uPlot(options, [points.map((point) => point.bytes / unit.bytes), all], place);
    fitted(chart, place, height);
    chart.over.addEventListener("click", () => {
      if (chart.cursor.idx !== null && chart.cursor.idx !== undefined) open(chart.cursor.idx);
    });
  }

  if (data.front && data.front.points.length) drawFront(data.front);
})();
