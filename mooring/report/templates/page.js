(() => {
"use strict";
// Every figure draws with a pen of few strokes; one pen paints a canvas, the other writes an SVG for saving.
// Text from data becomes text nodes and nothing else.
const RUNS = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["personal", "common", "alone", "undecided"];
const SERIES = ["common", "alone", "personal", "undecided"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const FIRST = ["client", "recommended", "how_sure", "will_do", "saved", "saved_low", "saved_high", "chance_over_alone",
  "chance_over_common", "rows", "alone", "common", "personal", "lambda"];
const PAGE = 25, NAMED = 300, MANY = 1500, FAR = 8, ROWS_SHOWN = 200;
const TURN = Math.PI * (3 - Math.sqrt(5));  // the golden angle spreads boats of like distance all around
const figures = [];

const known = x => typeof x === "number" && isFinite(x);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const shades = {};  // of the theme, emptied when it changes: asking the style for each of many marks is slow
const colour = name => shades[name] ??= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const colourOf = kind => colour(KINDS.includes(kind) ? kind : "undecided");
const median = values => { const s = [...values].sort((a, b) => a - b); return s.length ? s[s.length >> 1] : 0; };
const quantile = (values, q) => { const s = [...values].sort((a, b) => a - b); return s[Math.floor(q * (s.length - 1))]; };
function number(x, digits = 4) {
  if (x === null || x === undefined || x === "") return "-";
  if (typeof x === "boolean") return x ? "yes" : "no";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size >= 1e4 && size < 1e9 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
}
const percent = x => known(x) ? `${x > 0 ? "+" : ""}${Number(x.toPrecision(3))} %` : "-";
const chance = x => known(x) ? (x > 0.99 ? "over 99 %" : x < 0.01 ? "under 1 %" : `${Math.round(100 * x)} %`) : "-";
function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
function save(name, data, type) {
  const at = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  make("a", { href: at, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(at), 10000);
}
// A spreadsheet would run text that begins like a formula: an apostrophe keeps it text. Numbers stay numbers.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
const csv = (heads, rows) => [heads, ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
const fileName = (run, part, ending) => `${run.name}-${part}.${ending}`.replace(/[^\w.-]+/g, "-");

function canvasPen(context) {
  const set = o => {
    context.globalAlpha = o.alpha ?? 1;
    context.setLineDash(o.dash ?? []);
    context.lineWidth = o.width ?? 1;
  };
  const finish = o => {
    if (o.fill) { context.fillStyle = o.fill; context.fill(); }
    if (o.stroke) { context.strokeStyle = o.stroke; context.stroke(); }
  };
  return {
    poly(points, o) {
      set(o);
      context.beginPath();
      points.forEach(([x, y], k) => k ? context.lineTo(x, y) : context.moveTo(x, y));
      if (o.closed) context.closePath();
      finish(o);
    },
    circle(x, y, r, o) { set(o); context.beginPath(); context.arc(x, y, r, 0, 2 * Math.PI); finish(o); },
    text(x, y, words, o) {
      context.globalAlpha = 1;
      context.font = `${o.size ?? 12}px system-ui, sans-serif`;
      context.textAlign = { start: "left", middle: "center", end: "right" }[o.anchor ?? "start"];
      context.textBaseline = "middle";
      context.fillStyle = o.fill;
      context.save();
      context.translate(x, y);
      if (o.turn) context.rotate(-Math.PI / 2);
      context.fillText(words, 0, 0);
      context.restore();
    },
  };
}
function svgPen(parts) {
  const clean = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`).replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, " ");
  const at = x => Number(x.toFixed(2));
  const look = o => `fill="${o.fill || "none"}" stroke="${o.stroke || "none"}" stroke-width="${o.width ?? 1}"` +
    (o.alpha !== undefined ? ` opacity="${at(o.alpha)}"` : "") + (o.dash?.length ? ` stroke-dasharray="${o.dash.join(" ")}"` : "");
  return {
    poly: (points, o) => parts.push(`<path d="M${points.map(([x, y]) => `${at(x)} ${at(y)}`).join("L")}${o.closed ? "Z" : ""}" ${look(o)}/>`),
    circle: (x, y, r, o) => parts.push(`<circle cx="${at(x)}" cy="${at(y)}" r="${at(r)}" ${look(o)}/>`),
    text: (x, y, words, o) => parts.push(`<text x="${at(x)}" y="${at(y)}" dy=".35em" font-size="${o.size ?? 12}" ` +
      `font-family="sans-serif" text-anchor="${o.anchor ?? "start"}" fill="${o.fill}"` +
      `${o.turn ? ` transform="rotate(-90 ${at(x)} ${at(y)})"` : ""}>${clean(words)}</text>`),
  };
}

// A figure: a canvas with what it says as text, what the pointer or the arrow keys are at, its data, and copies to save.
function figure(run, host, spec) {
  const canvas = make("canvas", { role: "img", tabindex: spec.marks === false ? null : "0" });
  const readout = make("p", { class: "readout" });
  const caption = make("figcaption");
  const body = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Data of: ${spec.title}` });
  const data = make("details", { ontoggle: fill }, make("summary", {}, "Data"), body);
  const tools = make("div", { class: "tools" },
    make("button", { type: "button", onclick: () => save(fileName(run, spec.name, "csv"), csv(...spec.data()), "text/csv") }, "CSV"),
    make("button", { type: "button", onclick: saveSvg }, "SVG"),
    make("button", { type: "button", onclick: () => canvas.toBlob(blob => save(fileName(run, spec.name, "png"), blob)) }, "PNG"));
  host.append(make("figure", {}, canvas, spec.marks === false ? "" : readout, caption), tools, data);
  let base = null, marks = [], width = 0, height = 0, place = spec.at;  // `at`: places of its own, not clients
  const at = () => spec.at === undefined ? run.picked : place;
  const go = i => { if (spec.at === undefined) run.pick(i); else { place = i; show(); } };
  const size = () => [Math.max(canvas.clientWidth, 260), spec.height(Math.max(canvas.clientWidth, 260))];

  function fill() {
    if (!data.open) return;
    const [heads, rows] = spec.data();
    const table = make("table", { class: "plain" },
      make("thead", {}, make("tr", {}, ...heads.map(h => make("th", { scope: "col" }, h)))),
      make("tbody", {}, ...rows.slice(0, ROWS_SHOWN).map(row => make("tr", {}, ...row.map(x => make("td", { class: typeof x === "number" ? "number" : false }, number(x)))))));
    body.replaceChildren(table, ...(rows.length > ROWS_SHOWN ? [make("p", {}, `The first ${ROWS_SHOWN} of ${number(rows.length)} rows; the CSV has all.`)] : []));
  }
  function saveSvg() {
    const parts = [];
    const [w, h] = size(), pen = svgPen(parts);
    spec.draw(pen, w, h);
    spec.over?.(pen, marks, at());
    save(fileName(run, spec.name, "svg"), `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}">` +
      `<rect width="100%" height="100%" fill="${colour("panel")}"/>${parts.join("")}</svg>`, "image/svg+xml");
  }
  function paint() {
    [width, height] = size();
    const ratio = window.devicePixelRatio || 1;
    base = document.createElement("canvas");
    for (const one of [base, canvas]) { one.width = Math.round(width * ratio); one.height = Math.round(height * ratio); }
    canvas.style.height = `${height}px`;
    const context = base.getContext("2d");
    context.scale(ratio, ratio);
    marks = spec.draw(canvasPen(context), width, height) || [];
    show();
  }
  function show() {
    const context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalAlpha = 1;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(base, 0, 0);
    context.scale(ratio, ratio);
    spec.over?.(canvasPen(context), marks, at());
    const words = spec.describe();
    canvas.setAttribute("aria-label", `${spec.title}. ${words}`);
    caption.textContent = words;
    if (spec.marks !== false) readout.textContent = spec.say(at());
    if (data.open && spec.lively) fill();
  }
  function nearest(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 28 ** 2;
    for (const mark of marks) {
      const away = (mark.x - x) ** 2 + (spec.upright ? 0 : (mark.y - y) ** 2);
      if (away < least) { least = away; best = mark; }
    }
    return best;
  }
  if (spec.marks !== false) {
    canvas.addEventListener("pointermove", event => { const near = nearest(event); readout.textContent = spec.say(near ? near.i : at()); });
    canvas.addEventListener("pointerleave", () => { readout.textContent = spec.say(at()); });
    canvas.addEventListener("click", event => { const near = nearest(event); if (near) go(near.i); });
    canvas.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !marks.length) return;
      event.preventDefault();
      const now = marks.findIndex(mark => mark.i === at());
      go(marks[(now + step + marks.length) % marks.length].i);
    });
  }
  figures.push(paint);
  new ResizeObserver(() => { if (Math.abs(size()[0] - width) > 1) paint(); }).observe(canvas);
  paint();
  return { paint, show };
}

function ticks(low, high, most = 6) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough)), part = rough / power;
  const step = power * (part > 5 ? 10 : part > 2 ? 5 : part > 1 ? 2 : 1), out = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-9; x += step) out.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return out;
}
function logTicks(low, high) {
  const out = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.ceil((to - from) / 7);
  for (let k = from; k <= to; k += every) if (10 ** k >= low * 0.999 && 10 ** k <= high * 1.001) out.push(10 ** k);
  return out.length > 1 ? out : [low, high];
}
// Axes inside a frame; the scales take numbers to places.
function axes(pen, w, h, o) {
  const left = o.left ?? 58, right = w - 12, top = 12, bottom = h - 44;
  const scale = (low, high, a, b, log) => log
    ? x => a + (b - a) * (Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1)
    : x => a + (b - a) * (x - low) / (high - low || 1);
  const x = scale(...o.x, left, right, o.logx), y = scale(...o.y, bottom, top);
  const ink = colour("soft"), line = colour("line");
  for (const tick of ticks(...o.y, Math.max(2, Math.floor((bottom - top) / 50)))) {
    pen.poly([[left, y(tick)], [right, y(tick)]], { stroke: line });
    pen.text(left - 6, y(tick), number(tick), { anchor: "end", fill: ink });
  }
  if (o.xticks !== false) for (const tick of o.logx ? logTicks(...o.x) : ticks(...o.x, Math.max(2, Math.floor((right - left) / 90)))) {
    pen.poly([[x(tick), bottom], [x(tick), bottom + 4]], { stroke: ink });
    pen.text(clamp(x(tick), left, right - 8), bottom + 13, number(tick, 2), { anchor: "middle", fill: ink });
  }
  pen.text((left + right) / 2, h - 10, o.xlabel, { anchor: "middle", fill: ink });
  pen.text(11, (top + bottom) / 2, o.ylabel, { anchor: "middle", fill: ink, turn: true });
  return { x, y, left, right, top, bottom };
}
// Marks differ by shape as well as by colour: a sail for personal, a disc for common, a square for alone, a ring if undecided.
function mark(pen, kind, x, y, s, alpha, open) {
  const fill = colourOf(kind);
  const o = open || kind === "undecided" || !KINDS.includes(kind) ? { stroke: fill, width: 1.6, alpha } : { fill, alpha };
  if (kind === "personal") pen.poly([[x, y - 1.25 * s], [x + s, y + .75 * s], [x - s, y + .75 * s]], { ...o, closed: true });
  else if (kind === "alone") pen.poly([[x - .85 * s, y - .85 * s], [x + .85 * s, y - .85 * s], [x + .85 * s, y + .85 * s], [x - .85 * s, y + .85 * s]], { ...o, closed: true });
  else pen.circle(x, y, .95 * s, o);
}
function boat(pen, kind, x, y, s, alpha, open) {
  const hull = [[-1.3, .35], [1.3, .35], [.8, 1.05], [-.8, 1.05]].map(([a, b]) => [x + a * s, y + b * s]);
  pen.poly(hull, { fill: colourOf(kind), alpha, closed: true });
  mark(pen, kind, x, y - .5 * s, .62 * s, alpha, open);
}
function legend(run) {
  const list = make("ul", { class: "legend" });
  const count = {};
  for (const kind of run.clients.recommended) count[kind] = (count[kind] || 0) + 1;
  for (const kind of [...KINDS, ""].filter(k => count[k])) {
    const parts = [];
    mark(svgPen(parts), kind, 8, 8, 6, 1);
    const art = new DOMParser().parseFromString(`<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" aria-hidden="true">${parts.join("")}</svg>`, "image/svg+xml");
    list.append(make("li", {}, document.importNode(art.documentElement, true), `${kind || "no test rows"} (${number(count[kind])})`));
  }
  return list;
}
function drawLegend(run, host) {
  let list = legend(run);
  host.append(list);
  figures.push(() => { const fresh = legend(run); list.replaceWith(fresh); list = fresh; });
}

function mooring(run, host) {
  const c = run.clients, m = run.count, far = c.distance, order = [];
  if (!far || !far.some(known)) {
    host.append(make("p", {}, "The run keeps no personal models to measure distances with."));
    return null;
  }
  order.push(...run.all.filter(i => known(far[i])).sort((a, b) => far[a] - far[b] || a - b));
  const distances = order.map(i => far[i]), most = Math.max(...distances), usual = quantile(distances, .98);
  const limit = most <= 1.6 * usual || usual === 0 ? most : 1.15 * usual;
  const beyond = distances.filter(d => d > limit).length;
  const stiff = i => known(c.lambda?.[i]) && c.lambda[i] > 0 ? Math.log(c.lambda[i]) : known(c.alpha?.[i]) ? 1 - c.alpha[i] : null;
  const all = order.map(stiff).filter(known), low = Math.min(...all), high = Math.max(...all);
  const tight = i => { const s = stiff(i); return s === null ? 0 : high > low ? (s - low) / (high - low) : .4; };
  let size = 0;
  drawLegend(run, host);
  return figure(run, host, {
    name: "mooring", title: "The mooring picture",
    height: w => clamp(w, 300, 560),
    describe: () => `Each client is a boat; its distance from the buoy in the middle is how far its model is from the common one ` +
      `(up to ${number(most, 3)}, half of them within ${number(median(distances), 3)}). ` +
      (all.length ? "The thicker its line, the stiffer it is moored. " : "") +
      (run.recommends ? "Shape and colour say what to deploy, paler is less sure." : "Shape and colour say which model has the lowest test loss.") +
      (beyond ? ` ${number(beyond)} beyond the rim are drawn open on it.` : ""),
    say: i => i === null ? "" : `${c.client[i]}: distance ${number(far[i], 3)}${known(c.lambda?.[i]) ? `, lambda ${number(c.lambda[i], 3)}` : ""}, ${c.recommended[i]}`,
    data: () => run.table(["client", "recommended", "how_sure", "distance", "lambda", "alpha"], order),
    draw(pen, w, h) {
      size = clamp(.16 * Math.min(w, h) / Math.sqrt(m), 2.2, 12);
      const x0 = w / 2, y0 = h / 2, radius = Math.min(w, h) / 2 - 22, soft = colour("soft"), line = colour("line");
      for (const tick of most > 0 ? ticks(0, limit, 4).slice(1) : []) {
        const r = 16 + (radius - 16) * tick / limit;
        pen.circle(x0, y0, r, { stroke: line, dash: [3, 4] });
        pen.text(x0 + 4, y0 - r - 7, number(tick, 3), { fill: soft, size: 11 });
      }
      const places = order.map((i, k) => {
        const angle = TURN * k;
        const r = 16 + (radius - 16) * (most > 0 ? Math.min(far[i] / limit, 1) : .25);
        return { i, x: x0 + r * Math.cos(angle), y: y0 + r * Math.sin(angle), open: far[i] > limit };
      });
      const thin = m > MANY ? .25 : m > NAMED ? .5 : 1;
      for (const p of places) pen.poly([[x0, y0], [p.x, p.y]],
        { stroke: colourOf(c.recommended[p.i]), width: thin * (.5 + 3.5 * tight(p.i)), alpha: (m > MANY ? .2 : .45) * (.35 + .65 * run.certain(p.i)) });
      for (const p of places) (m > NAMED ? mark : boat)(pen, c.recommended[p.i], p.x, p.y, size, .3 + .7 * run.certain(p.i), p.open);
      pen.circle(x0, y0, 9, { fill: colour("panel"), stroke: colour("ink"), width: 2 });
      pen.circle(x0, y0, 4, { fill: colour("ink") });
      return places;
    },
    over(pen, marks) {
      const p = marks.find(one => one.i === run.picked);
      if (p) pen.circle(p.x, p.y, size + 5, { stroke: colour("ink"), width: 2.5 });
    },
  });
}

function gainsFigure(run, host) {
  const c = run.clients;
  const order = run.all.filter(i => known(c.saved?.[i])).sort((a, b) => c.saved[b] - c.saved[a]);
  if (!order.length) { host.append(make("p", {}, "There is no loss of training alone to compare with.")); return null; }
  const gain = order.map(i => c.saved[i]), middle = median(gain), spans = !!c.saved_low;
  const halves = spans ? order.map(i => ((c.saved_high[i] ?? 0) - (c.saved_low[i] ?? 0)) / 2) : [0];
  const reach = FAR * Math.max(median(gain.map(g => Math.abs(g - middle))), median(halves) / 2, .1);
  const near = order.filter(i => Math.abs(c.saved[i] - middle) <= reach);
  const ends = near.flatMap(i => [c.saved[i], c.saved_low?.[i] ?? c.saved[i], c.saved_high?.[i] ?? c.saved[i]]);
  const band = run.practical;
  const low = Math.min(Math.max(ends.reduce((a, b) => Math.min(a, b)), middle - reach), -1.3 * band);
  const high = Math.max(Math.min(ends.reduce((a, b) => Math.max(a, b)), middle + reach), 1.3 * band);
  const outside = gain.filter(g => g < low || g > high).length;
  const more = gain.filter(g => g > band).length, less = gain.filter(g => g < -band).length;
  const frame = { x: [-.5, order.length - .5], y: [low, high], xticks: false };
  const size = clamp(300 / order.length, 1.6, 6);
  return figure(run, host, {
    name: "gains", title: "Gain of every client", upright: true,
    height: w => w < 500 ? 300 : 340,
    describe: () => `What each client's model saves over training alone, in per cent of its loss alone, the most first` +
      `${spans ? ", with 95 % intervals" : ""}. ${number(more)} of ${number(order.length)} save more than ${number(band)} %, ${number(less)} lose more than that; ` +
      `the band between makes no practical difference.${outside ? ` ${number(outside)} beyond the edge are drawn open on it.` : ""}`,
    say: i => i === null ? "" : `${c.client[i]}: ${percent(c.saved?.[i])}${spans && known(c.saved_low[i]) ? ` (${percent(c.saved_low[i])} to ${percent(c.saved_high[i])})` : ""}, ${c.recommended[i]}`,
    data: () => run.table(["client", "saved", "saved_low", "saved_high", "gain", "gain_low", "gain_high", "recommended", "how_sure"], order),
    draw(pen, w, h) {
      const a = axes(pen, w, h, { ...frame, xlabel: `${number(order.length)} clients, by gain`, ylabel: "saved over alone, %" });
      const at = g => a.y(clamp(g, low, high));
      pen.poly([[a.left, a.y(band)], [a.right, a.y(band)], [a.right, a.y(-band)], [a.left, a.y(-band)]], { fill: colour("soft"), alpha: .18, closed: true });
      pen.poly([[a.left, a.y(0)], [a.right, a.y(0)]], { stroke: colour("ink") });
      const width = clamp(300 / order.length, .4, 2);
      if (spans) order.forEach((i, k) => {
        if (known(c.saved_low[i])) pen.poly([[a.x(k), at(c.saved_low[i])], [a.x(k), at(c.saved_high[i])]],
          { stroke: colourOf(c.recommended[i]), width, alpha: (order.length > MANY ? .25 : .55) });
      });
      return order.map((i, k) => {
        mark(pen, c.recommended[i], a.x(k), at(c.saved[i]), size, .4 + .6 * run.certain(i), c.saved[i] < low || c.saved[i] > high);
        return { i, x: a.x(k), y: at(c.saved[i]) };
      });
    },
    over(pen, marks) {
      const p = marks.find(one => one.i === run.picked);
      if (p) pen.circle(p.x, p.y, size + 5, { stroke: colour("ink"), width: 2.5 });
    },
  });
}

function curves(pen, a, lines) {
  lines.forEach((line, k) => {
    const shade = colour(line.colour ?? SERIES[k % SERIES.length]), points = line.points.map(([x, y]) => [a.x(x), a.y(y)]);
    pen.poly(points, { stroke: shade, width: line.width ?? 2, dash: line.dash ?? DASHES[k % DASHES.length] });
    if (line.dots) for (const [x, y] of points) pen.circle(x, y, 3, { fill: shade });
  });
}
// Where few points of the lines lie: one of six places.
function key(pen, a, entries) {
  const width = Math.max(...entries.map(e => e.label.length)) * 6.6 + 34, height = 17 * entries.length + 4;
  const dots = entries.flatMap(e => (e.points ?? []).flatMap(([x, y], k, all) => {
    const [u, v] = all[Math.min(k + 1, all.length - 1)], many = Math.ceil(60 / all.length);
    return Array.from({ length: many }, (_, j) => j / many).map(s => [(1 - s) * a.x(x) + s * a.x(u), (1 - s) * a.y(y) + s * a.y(v)]);
  }));
  const places = [a.top + 4, (a.top + a.bottom - height) / 2, a.bottom - height - 4].flatMap(y => [[a.right - width, y], [a.left + 4, y]]);
  const hidden = ([x, y]) => dots.filter(([u, v]) => u > x - 4 && u < x + width + 4 && v > y - 4 && v < y + height + 4).length;
  const [left, top] = places.reduce((best, one) => hidden(one) < hidden(best) ? one : best);
  pen.poly([[left, top], [left + width, top], [left + width, top + height], [left, top + height]], { fill: colour("panel"), alpha: .85, closed: true });
  entries.forEach((e, k) => {
    const y = top + 10 + 17 * k;
    pen.poly([[left + 4, y], [left + 28, y]], { stroke: colour(e.colour), width: 2, dash: e.dash });
    pen.text(left + 32, y, e.label, { fill: colour("ink"), size: 11 });
  });
}
const nearestTo = (values, x) => values.reduce((best, v, k) => Math.abs(v - x) < Math.abs(values[best] - x) ? k : best, 0);
function spanOf(values, room = .08) {
  const low = Math.min(...values), high = Math.max(...values), more = (high - low || Math.abs(high) || 1) * room;
  return [low - more, high + more];
}

function pathFigure(run, host) {
  const path = run.path, plan = path.plan, mine = () => path.clients?.[run.picked];
  const lams = path.lambda, best = path.loss.indexOf(Math.min(...path.loss));
  return figure(run, host, {
    name: "path", title: "Loss along the path", marks: false, lively: true,
    height: w => w < 500 ? 300 : 340,
    describe: () => `Held-out ${run.metric} of all clients against lambda, from slack lines (everyone alone, ${number(path.alone)}) to taut ones (one common model, ${number(path.common)}); ` +
      `the best single lambda is ${number(lams[best], 3)} with ${number(path.loss[best])}. The plan is ${plan.about}: ${number(plan.loss)}.` +
      (path.clients ? " The client that is picked has a line of its own." : ""),
    data: () => [["lambda", "loss", ...(mine() ? [String(run.clients.client[run.picked])] : [])], lams.map((lam, k) => [lam, path.loss[k], ...(mine() ? [mine()[k]] : [])])],
    draw(pen, w, h) {
      const own = mine(), losses = [...path.loss, path.alone, path.common, plan.loss, ...(own || [])].filter(known);
      const a = axes(pen, w, h, { x: [Math.min(...lams), Math.max(...lams)], y: spanOf(losses), logx: true,
        xlabel: "lambda: slack to taut", ylabel: `held-out ${run.metric}` });
      const across = y => [[Math.min(...lams), y], [Math.max(...lams), y]];
      const lines = [
        { points: across(path.alone), colour: "alone", dash: [7, 4], label: "alone" },
        { points: across(path.common), colour: "common", dash: [2, 3], label: "common" },
        { points: lams.map((lam, k) => [lam, path.loss[k]]), colour: "ink", dash: [], dots: true, label: "one lambda for all" },
      ];
      if (own) lines.push({ points: lams.map((lam, k) => [lam, own[k]]).filter(p => known(p[1])), colour: "accent", dash: [], label: String(run.clients.client[run.picked]).slice(0, 24) });
      curves(pen, a, lines);
      const low = clamp(plan.low ?? lams[0], Math.min(...lams), Math.max(...lams)), high = clamp(plan.high ?? lams.at(-1), Math.min(...lams), Math.max(...lams));
      pen.poly([[a.x(low), a.y(plan.loss)], [a.x(high), a.y(plan.loss)]], { stroke: colour("personal"), width: 4 });
      if (known(plan.middle)) mark(pen, "personal", a.x(clamp(plan.middle, low, high)), a.y(plan.loss), 7, 1);
      key(pen, a, [...lines, { label: "the plan", colour: "personal", dash: [], points: [[low, plan.loss], [high, plan.loss]] }]);
    },
  });
}

function rowsFigure(run, host) {
  const c = run.curve, rows = c.rows;
  const span = [rows[0], rows.at(-1)];
  const at = (values, n) => {  // between the points, along the logarithm of rows
    const k = clamp(rows.findIndex(r => r >= n), 1, rows.length - 1);
    const share = (Math.log(n) - Math.log(rows[k - 1])) / (Math.log(rows[k]) - Math.log(rows[k - 1]));
    return values[k - 1] + share * (values[k] - values[k - 1]);
  };
  const here = at(c.personal, c.now), most = Math.max(...c.alone), least = Math.min(...c.personal);
  const shown = ["alone", "personal", ...(c.common[0] < 2 * most - least ? ["common"] : [])];  // far away it would flatten the others
  return figure(run, host, {
    name: "rows", title: "Rows until training alone does as well", upright: true, at: nearestTo(rows, c.now),
    height: w => w < 500 ? 300 : 340,
    describe: () => `Expected ${run.metric} of a typical client by its number of rows. With its ${number(Math.round(c.now))} rows of today it has ${number(at(c.alone, c.now))} alone and ` +
      `${number(here)} with its personal model; alone it would reach that with ${number(Math.round(c.match))} rows. ` +
      `One common model has ${number(c.common[0])}${shown.includes("common") ? "" : ", beyond the edge"}. The level is that of the rows that were held out; its course with more rows is theory.`,
    say: k => `${number(Math.round(rows[k]))} rows: alone ${number(c.alone[k])}, personal ${number(c.personal[k])}, common ${number(c.common[k])}`,
    data: () => [["rows", "alone", "personal", "common"], rows.map((n, k) => [n, c.alone[k], c.personal[k], c.common[k]])],
    draw(pen, w, h) {
      const a = axes(pen, w, h, { x: span, y: spanOf(shown.flatMap(name => c[name])), logx: true, xticks: false, xlabel: "rows of the client", ylabel: `expected ${run.metric}` });
      const lines = shown.map((name, k) => ({ points: rows.map((n, j) => [n, c[name][j]]), colour: name, dash: DASHES[[1, 0, 2][k]], label: name }));
      for (const [n, words] of [[c.now, `${number(Math.round(c.now))} now`], [c.match, `${number(Math.round(c.match))} to match`]]) {
        pen.poly([[a.x(n), a.top], [a.x(n), a.bottom]], { stroke: colour("soft"), dash: [4, 4] });
        pen.text(clamp(a.x(n), a.left + 34, a.right - 44), a.bottom + 13, words, { anchor: "middle", fill: colour("ink") });
      }
      curves(pen, a, lines);
      pen.poly([[a.x(c.now), a.y(here)], [a.x(c.match), a.y(here)]], { stroke: colour("ink"), width: 1.5, dash: [2, 4] });
      mark(pen, "personal", a.x(c.now), a.y(here), 6, 1);
      mark(pen, "alone", a.x(c.match), a.y(here), 6, 1);
      key(pen, a, lines);
      return rows.map((n, i) => ({ i, x: a.x(n), y: a.y(c.alone[i]) }));
    },
    over(pen, marks, k) {
      const p = marks[k];
      if (p) pen.circle(p.x, p.y, 8, { stroke: colour("ink"), width: 2 });
    },
  });
}

function roundsFigure(run, host) {
  const parts = ["test", "validation", "train"].filter(p => run.rounds.some(r => r.table[p])), one = run.rounds.length === 1;
  const options = names => names.map(([value, label]) => make("option", { value }, label));
  const across = make("select", { "aria-label": "Horizontal axis", onchange: () => drawn.paint() },
    ...options([["round", "by round"], ["bytes", "by bytes sent"], ["gradients", "by gradients"], ["seconds", "by seconds"],
      ["epsilon", "by epsilon spent"]].filter(([value]) => run.rounds.some(r => value in r.table))));
  const part = make("select", { "aria-label": "Rows", onchange: () => drawn.paint() }, ...options(parts.map(p => [p, `${p} rows`])));
  host.append(make("div", { class: "tools" }, across, ...(one ? [] : [part])));
  const lines = () => {
    const x = across.value;
    const found = one ? parts.map(p => ({ label: p, table: run.rounds[0].table, y: p, kept: run.rounds[0].kept }))
      : run.rounds.map(r => ({ label: r.name, table: r.table, y: part.value, kept: r.kept }));
    return found.filter(f => f.table[f.y]).map((f, k) => ({ ...f, colour: SERIES[k % SERIES.length], dash: DASHES[k % DASHES.length],
      points: f.table.round.map((t, j) => [f.table[x][j], f.table[f.y][j], t]).filter(p => known(p[0]) && known(p[1])) })).filter(f => f.points.length);
  };
  const drawn = figure(run, host, {
    name: "rounds", title: "Loss by round", marks: false, lively: true,
    height: w => w < 500 ? 300 : 340,
    describe: () => lines().map(f => `${f.label}: ${number(f.points[0][1])} at first, ${number(f.points.at(-1)[1])} at the end, round ${f.kept} is kept`).join("; ") + ". Rings mark the rounds that are kept." +
      (one && known(run.rounds[0].table.epsilon?.at(-1)) ? ` The epsilon spent grows to ${number(run.rounds[0].table.epsilon.at(-1), 3)}.` : ""),
    data: () => {
      const names = ["round", ...parts, "bytes", "gradients", "seconds", "epsilon"].filter(n => run.rounds.some(r => n in r.table));
      return [["method", ...names], run.rounds.flatMap(r => r.table.round.map((_, j) => [r.name, ...names.map(n => r.table[n]?.[j] ?? null)]))];
    },
    draw(pen, w, h) {
      const found = lines(), xs = found.flatMap(f => f.points.map(p => p[0])), ys = found.flatMap(f => f.points.map(p => p[1]));
      if (!xs.length) return;
      const x = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
      const a = axes(pen, w, h, { x: x[0] === x[1] ? [x[0], x[0] + 1] : x, y: spanOf(ys), xlabel: across.selectedOptions[0].textContent.replace("by ", ""), ylabel: `${one ? "" : part.value + " "}${run.metric}` });
      curves(pen, a, found.map(f => ({ ...f, dots: f.points.length < 3 })));
      for (const f of found) for (const p of f.points) if (p[2] === f.kept) pen.circle(a.x(p[0]), a.y(p[1]), 6, { stroke: colour("ink"), width: 2 });
      key(pen, a, found);
    },
  });
  return drawn;
}

function spreadFigure(run, host) {
  const s = run.spread, rows = [...s.borders].sort((a, b) => a.R - b.R);
  const values = [s.R, s.low, s.high, ...rows.map(r => r.R)].filter(x => known(x) && x > 0);
  if (!known(s.R) || !values.length) { host.append(make("p", {}, "How much clients differ could not be estimated.")); return null; }
  const low = Math.min(...values) / 1.6, high = Math.max(...values) * 1.6;
  return figure(run, host, {
    name: "heterogeneity", title: "Heterogeneity against the thresholds", marks: false,
    height: () => 70 + 34 * rows.length,
    describe: () => `The clients' models differ by R = ${number(s.R, 3)}${known(s.low) ? ` (95 % interval ${number(s.low, 3)} to ${number(s.high, 3)})` : ""}, the shaded line. ` +
      rows.map(r => `${r.name}: border ${number(r.R, 3)}${r.side ? `, speaks for ${r.side}` : ""}`).join("; ") + ".",
    data: () => [["what", "R", "low", "high", "speaks for", "from"], [["the clients", s.R, s.low, s.high, "", ""], ...rows.map(r => [r.name, r.R, null, null, r.side, r.source])]],
    draw(pen, w, h) {
      const left = 92, right = w - 70, top = 10, bottom = h - 44, ink = colour("soft");
      const x = v => left + (right - left) * (Math.log(clamp(v, low, high)) - Math.log(low)) / (Math.log(high) - Math.log(low));
      if (known(s.low)) pen.poly([[x(s.low), top], [x(s.high), top], [x(s.high), bottom], [x(s.low), bottom]], { fill: colour("accent"), alpha: .22, closed: true });
      pen.poly([[x(s.R), top], [x(s.R), bottom]], { stroke: colour("accent"), width: 3 });
      rows.forEach((r, k) => {
        const y = top + 17 + 34 * k;
        pen.poly([[left, y], [right, y]], { stroke: colour("line") });
        pen.text(left - 8, y, r.name, { anchor: "end", fill: colour("ink") });
        mark(pen, r.side, x(r.R), y, 6, 1);
        pen.text(right + 6, y, r.side, { fill: colour("ink") });
      });
      for (const tick of logTicks(low, high)) pen.text(clamp(x(tick), left + 10, right - 10), bottom + 13, number(tick, 2), { anchor: "middle", fill: ink });
      pen.text((left + right) / 2, h - 10, "R: how far clients' models lie apart", { anchor: "middle", fill: ink });
    },
  });
}

function card(run, host) {
  const c = run.clients, body = make("div"), list = make("datalist", { id: `names-${run.index}` });
  const find = text => {
    const want = text.toLowerCase(), out = [];
    for (const i of run.all) if (run.names[i].includes(want)) { out.push(i); if (out.length === 30) break; }
    return out;
  };
  const search = make("input", {
    type: "search", list: list.id, placeholder: "Find a client", "aria-label": "Find a client",
    oninput: () => {
      const found = find(search.value);
      list.replaceChildren(...found.map(i => make("option", { value: c.client[i] })));
      const exact = run.all.find(i => String(c.client[i]) === search.value);
      if (exact !== undefined) run.pick(exact);
    },
    onchange: () => { const found = find(search.value); if (search.value && found.length && !run.names.includes(search.value.toLowerCase())) run.pick(found[0]); },
  });
  const move = step => () => { const at = run.order.indexOf(run.picked); run.pick(run.order[(at + step + run.count) % run.count]); };
  host.append(make("div", { class: "tools" }, search, list,
    make("button", { type: "button", onclick: move(-1), "aria-label": "Previous client by gain" }, "‹"),
    make("button", { type: "button", onclick: move(1), "aria-label": "Next client by gain" }, "›")), body);

  function why(i) {
    const out = [], name = x => x === 1 ? "" : "s";
    if (known(c.saved?.[i])) out.push(`Its personal model's ${c.judged_rows ? "held-out" : "test"} loss is ${Math.abs(c.saved[i]).toPrecision(3)} % ${c.saved[i] >= 0 ? "below" : "above"} that of training alone` +
      (known(c.saved_low?.[i]) ? (c.saved_low[i] > 0 || c.saved_high[i] < 0 ? "; the interval leaves no doubt on which side." : "; the interval reaches across 0.") : "."));
    if (known(c.rows_to_match?.[i])) out.push(`Alone it would need about ${number(Math.ceil(c.rows_to_match[i]))} rows to do as well; it has ${number(c.rows[i])} row${name(c.rows[i])}.`);
    if (known(c.distance?.[i])) {
      const nearer = c.distance.filter(d => known(d) && d < c.distance[i]).length;
      out.push(`Its model lies farther from the common one than those of ${Math.round(100 * nearer / Math.max(run.count - 1, 1))} % of the other clients.`);
    }
    if (c.unlike?.[i] === true) out.push("Its model is unlike the rest.");
    if (known(c.brings?.[i])) out.push(`Without it the others' validation loss would ${c.brings[i] >= 0 ? "rise" : "fall"} by ${number(Math.abs(c.brings[i]), 2)}.`);
    if (run.path && c.plan?.[i] === run.path.plan.family) out.push(`Its plan: ${run.path.plan.about}.`);
    return out;
  }
  function losses(i) {
    const names = ["alone", "common", "personal"].filter(n => known(c[n]?.[i]));
    const more = run.purpose === "compare" ? run.columns.map(col => col.key).filter(k => run.methods.includes(k)) : [];
    const shown = more.length ? more : names;
    const most = Math.max(...shown.map(n => c[n][i]).filter(known));
    return make("table", { class: "plain bars" }, make("caption", {}, `Test ${run.metric} of its models`),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "model"), make("th", { scope: "col", class: "number" }, run.metric), make("td"))),
      make("tbody", {}, ...shown.map(n => {
        const bar = make("i");
        bar.style.width = `${clamp(100 * c[n][i] / most, 0, 100) || 0}%`;
        if (KINDS.includes(n)) bar.style.background = `var(--${n})`;
        return make("tr", {}, make("th", { scope: "row" }, n), make("td", { class: "number" }, number(c[n][i])), make("td", { class: "bar" }, bar));
      })));
  }
  function coefficients(i) {
    const k = run.coefficients;
    if (!k) return "";
    const rows = k.names.map((n, j) => [n, k.personal[i][j], k.common[j], k.personal[i][j] - k.common[j]]).sort((a, b) => Math.abs(b[3]) - Math.abs(a[3]));
    return make("details", {}, make("summary", {}, "Its coefficients"), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Its coefficients" },
      make("table", { class: "plain" }, make("thead", {}, make("tr", {}, ...["", "own", "common", "difference"].map(h => make("th", { scope: "col" }, h)))),
        make("tbody", {}, ...rows.map(([n, ...values]) => make("tr", {}, make("th", { scope: "row" }, n), ...values.map(v => make("td", { class: "number" }, number(v, 3)))))))));
  }
  return {
    show() {
      const i = run.picked;
      if (i === null) return;
      const facts = [[run.recommends ? "deploy" : "lowest test loss", c.recommended[i] + (c.how_sure ? ` (${c.how_sure[i]})` : "")]];
      if (c.will_do && c.will_do[i] !== c.recommended[i]) facts.push(["will do", c.will_do[i]]);
      facts.push(["rows", number(c.rows[i]) + (c.train ? ` (${number(c.train[i])} train, ${number(c.validation[i])} validation, ${number(c.test[i])} test)` : "")]);
      if (known(c.saved?.[i])) facts.push(["saved over alone", percent(c.saved[i]) + (known(c.saved_low?.[i]) ? ` (${percent(c.saved_low[i])} to ${percent(c.saved_high[i])})` : "")]);
      if (known(c.judged_rows?.[i])) facts.push(["judged on", `${number(c.judged_rows[i])} rows, each held out`]);
      if (known(c.chance_over_alone?.[i])) facts.push(["chance to beat alone", chance(c.chance_over_alone[i])]);
      if (known(c.chance_over_common?.[i])) facts.push(["chance to beat common", chance(c.chance_over_common[i])]);
      if (known(c.lambda?.[i])) facts.push(["lambda", number(c.lambda[i], 3)]);
      if (known(c.alpha?.[i])) facts.push(["own share", number(c.alpha[i], 3)]);
      body.replaceChildren(make("h4", {}, String(c.client[i])),
        make("dl", {}, ...facts.flatMap(([term, fact]) => [make("dt", {}, term), make("dd", {}, fact)])), losses(i),
        make("ul", {}, ...why(i).map(sentence => make("li", {}, sentence))), coefficients(i));
    },
  };
}

function clientsTable(run, host) {
  const c = run.clients, columns = () => every.checked ? run.columns : run.columns.filter(col => FIRST.includes(col.key) || run.methods.includes(col.key));
  const keys = {};  // a column's values for sorting: numbers within text in their order
  let by = null, down = false, page = 0, rows = run.all;
  const every = make("input", { type: "checkbox", onchange: draw, id: `every-${run.index}` });
  const text = make("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the clients", oninput: refilter });
  const kind = make("select", { "aria-label": "Only those with", onchange: refilter }, make("option", { value: "" }, "all"),
    ...KINDS.filter(k => c.recommended.includes(k)).map(k => make("option", { value: k }, k)));
  const count = make("span", { role: "status" }), head = make("thead"), body = make("tbody");
  const back = make("button", { type: "button", onclick: () => { page -= 1; draw(); } }, "Previous");
  const on = make("button", { type: "button", onclick: () => { page += 1; draw(); } }, "Next");
  const words = run.columns.filter(col => col.key !== "client" && c[col.key].some(x => typeof x === "string")).map(col => col.key);
  host.append(make("div", { class: "tools" }, text, kind, make("label", { for: every.id }, every, " all columns"),
    make("button", { type: "button", onclick: () => save(fileName(run, "clients", "csv"), csv(...run.table(run.columns.map(col => col.key), rows)), "text/csv") }, "Download CSV")),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Clients" }, make("table", { class: "clients" }, head, body)),
    make("div", { class: "tools" }, back, on, count));
  function refilter() {
    const want = text.value.toLowerCase();
    rows = run.all.filter(i => (!kind.value || c.recommended[i] === kind.value) &&
      (!want || run.names[i].includes(want) || words.some(key => String(c[key][i]).toLowerCase().includes(want))));
    resort();
  }
  function resort() {
    if (by !== null) {
      const values = keys[by] ??= c[by].map(x => typeof x === "string" ? x.toLowerCase().replace(/\d+/g, d => d.padStart(12, "0")) : x);
      const side = down ? -1 : 1;
      rows = [...rows].sort((a, b) => {
        const x = values[a], y = values[b];
        if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;  // what is missing comes last
        return (x < y ? -side : x > y ? side : 0) || a - b;
      });
    }
    page = 0;
    draw();
  }
  function sortBy(name) {
    down = by === name ? !down : typeof c[name].find(x => x !== null) === "number";
    by = name;
    resort();
    head.querySelector(`button[data-key="${CSS.escape(name)}"]`)?.focus();
  }
  function draw() {
    const shown = columns(), pages = Math.max(1, Math.ceil(rows.length / PAGE));
    page = clamp(page, 0, pages - 1);
    head.replaceChildren(make("tr", {}, ...shown.map(col => make("th", {
      scope: "col", class: typeof c[col.key].find(x => x !== null) === "number" ? "number" : false,
      "aria-sort": col.key === by ? (down ? "descending" : "ascending") : false,
    }, make("button", { type: "button", "data-key": col.key, onclick: () => sortBy(col.key) }, col.label + (col.key === by ? (down ? " ↓" : " ↑") : ""))))));
    body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(i => make("tr", { class: i === run.picked ? "picked" : false },
      ...shown.map(col => col.key === "client"
        ? make("td", {}, make("button", { type: "button", class: "name", onclick: () => { run.pick(i); run.toCard(); } }, String(c.client[i])))
        : make("td", { class: typeof c[col.key][i] === "number" ? "number" : false }, col.key.startsWith("saved") ? percent(c[col.key][i]) : col.key.startsWith("chance") ? chance(c[col.key][i]) : number(c[col.key][i]))))));
    count.textContent = `${number(rows.length)} of ${number(run.count)} clients, page ${page + 1} of ${pages}`;
    back.disabled = page === 0;
    on.disabled = page >= pages - 1;
  }
  draw();
  return { show: draw };
}

RUNS.forEach((run, index) => {
  const article = document.querySelector(`article[data-run="${index}"]`), part = name => article.querySelector(`[data-part="${name}"]`);
  const c = run.clients;
  run.index = index;
  run.count = c.client.length;
  run.all = c.client.map((_, i) => i);
  run.names = c.client.map(name => String(name).toLowerCase());
  run.methods = run.rounds.map(r => r.name).filter(name => name in c);
  run.certain = i => c.certainty?.[i] ?? 1;
  run.order = [...run.all].sort((a, b) => (c.saved?.[b] ?? -Infinity) - (c.saved?.[a] ?? -Infinity) || a - b);
  run.picked = run.count ? run.order[0] : null;
  run.table = (keys, rows) => {
    const had = keys.filter(key => key in c), labels = Object.fromEntries(run.columns.map(col => [col.key, col.key]));
    return [had.map(key => labels[key] ?? key), rows.map(i => had.map(key => c[key][i]))];
  };
  const parts = [];
  run.pick = i => {
    run.picked = i;
    for (const one of parts) one.repaint ? one.repaint() : one.show();
    document.getElementById("tip").textContent = `${c.client[i]} picked`;
  };
  run.toCard = () => part("card").scrollIntoView({ block: "nearest" });
  const add = one => { if (one) parts.push(one); };
  add(mooring(run, part("mooring")));
  add(card(run, part("card")));
  add(gainsFigure(run, part("gains")));
  if (run.path) { const path = pathFigure(run, part("path")); if (run.path.clients) add({ repaint: path.paint }); }
  if (run.curve) rowsFigure(run, part("rows"));
  if (run.rounds.length) roundsFigure(run, part("rounds"));
  if (run.spread && part("spread")) spreadFigure(run, part("spread"));
  add(clientsTable(run, part("table")));
  for (const one of parts) one.show?.();
});

const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
function label() { theme.textContent = dark() ? "Light" : "Dark"; }
function repaint() {
  for (const name of Object.keys(shades)) delete shades[name];
  label();
  figures.forEach((paint, k) => setTimeout(paint, k));  // one at a time: the page stays responsive with many clients
}
theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; repaint(); });
system.addEventListener("change", repaint);
label();
})();
