// Draws what /mmrouter/* says. What workers and clients named is only ever put in as text.
"use strict";

const PERIOD_MS = 2000;
const STEP_S = 10;
const STEPS = 90;
const MINUTE = 6; // steps
const SHOWN = 30;
const FIRST = { events: 6, decisions: 10 }; // before more are asked for
const CANDIDATES = 4;
const HOLD_MS = 10000;
const FAILING = 0.05; // share of requests that fail from which on it is not well

const find = (id) => document.getElementById(id);
let key = sessionStorage.getItem("mmrouter-admin-key") || "";
let timer = 0;
let ahead = 0; // seconds that the server's clock is ahead of the browser's
const open = new Set(); // rows that show more
const drawnFrom = new WeakMap(); // of each row

function make(name, text = "", className = "") {
  const element = document.createElement(name);
  element.append(text);
  if (className) element.className = className;
  return element;
}

const number = (value) => (value === null ? "–" : value.toLocaleString("en"));
const rounded = (value) => number(Math.round(value));
const percent = (value) => `${Math.round(100 * value)} %`;
const few = (value) => (value >= 100 ? rounded(value) : String(Number(value.toFixed(1))));
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const bytes = (value) =>
  value < 1e6 ? `${(value / 1e3).toFixed(1)} kB`
  : value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;
const seconds = (value) =>
  value === null ? "–" : value < 1 ? `${Math.round(1000 * value)} ms` : `${Number(value.toFixed(1))} s`;
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" });
const now = () => Date.now() / 1000 + ahead;

function duration(passed) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => passed >= size);
  if (first < 0) return "0 s";
  const [unit, size] = units[first];
  const rest = units[first + 1];
  const more = rest && first < 2 ? Math.floor((passed % size) / rest[1]) : 0;
  return `${Math.floor(passed / size)} ${unit}${more ? ` ${more} ${rest[0]}` : ""}`;
}

// What is asked of the server.

async function ask(path, method = "GET") {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  return fetch(path, { method, headers, cache: "no-store", credentials: "omit" });
}

async function get(path) {
  const answer = await ask(path);
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  const error = new Error(told.error?.message || `${path} answers ${answer.status}`);
  error.refused = answer.status === 401 || answer.status === 403;
  error.keyHelps = answer.status === 401 || answer.headers.has("www-authenticate");
  throw error;
}

const json = async (path) => (await get(path)).json();

async function post(path) {
  const answer = await ask(path, "POST");
  if (answer.ok) return;
  const told = await answer.json().catch(() => ({}));
  const reasons = (told.workers || []).map((one) => one.message).filter(Boolean);
  throw new Error(reasons.join("; ") || told.error?.message || `${path} answers ${answer.status}`);
}

// Tables: rows that stay the same are left alone, so that what one points at or reads stays.

function row(table, cells) {
  const line = make("tr");
  line.setAttribute("role", "row");
  cells.forEach((cell, place) => {
    const held = make("td");
    held.setAttribute("role", "cell");
    if (cell !== "") {
      held.dataset.label = table.tHead.rows[0].cells[place].textContent;
      const inner = make("div");
      inner.append(cell);
      held.append(inner);
    }
    line.append(held);
  });
  return line;
}

function fill(table, rows) {
  const body = table.tBodies[0];
  const known = new Map([...body.children].map((line) => [line.dataset.key, line]));
  const focused = document.activeElement?.dataset.focus;
  rows.forEach(({ key: name, state, draw }, place) => {
    const signature = JSON.stringify(state);
    let line = known.get(name);
    if (!line || drawnFrom.get(line) !== signature) {
      line = draw();
      line.dataset.key = name;
      drawnFrom.set(line, signature);
    }
    if (body.children[place] !== line) body.insertBefore(line, body.children[place] || null);
  });
  while (body.children.length > rows.length) body.lastChild.remove();
  if (focused && document.activeElement?.dataset.focus !== focused) {
    document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }
}

function button(text, label, act, focus = label) {
  const made = make("button", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.dataset.focus = focus;
  made.addEventListener("click", act);
  return made;
}

// The newest of a list, or all, with the button for that.
function some(name, items) {
  const all = open.has(name);
  const more = find(`more-${name}`);
  more.hidden = items.length <= FIRST[name];
  more.textContent = `Show ${all ? "fewer" : "more"} ${name}`;
  more.setAttribute("aria-expanded", all);
  return items.slice(0, all ? SHOWN : FIRST[name]);
}

function turn(name) {
  if (!open.delete(name)) open.add(name);
  draw();
}

function toggle(name, what) {
  const made = button(open.has(name) ? "less" : "more", `More of ${what}`, () => turn(name));
  made.setAttribute("aria-expanded", open.has(name));
  return made;
}

// Workers: health in words, whether they take requests, and those that are gone.

function health(worker) {
  const said = (kind, text, takes = false) => ({ kind, text, takes });
  const running = worker.active_requests;
  const left = running ? `, ${plural(running, "request")} left` : "";
  const why = worker.circuit_reason && `: ${worker.circuit_reason}`;
  if (!worker.connected) {
    if (worker.gone_at === null) return said("bad", "not connected");
    const left = worker.state === "left";
    const gone = `${left ? "left" : "lost"} ${duration(now() - worker.gone_at)} ago: ${worker.gone_reason}`;
    return said(left ? "quiet" : "bad", gone);
  }
  if (worker.drained) return said("warn", running ? `draining${left}` : "drained");
  if (worker.state !== "ready") return said("warn", `leaving${left}`);
  if (worker.condition && worker.condition !== "serving") return said("warn", worker.condition);
  if (worker.circuit === "open") {
    const due = worker.ejected_for_s;
    return said("bad", (due > 0 ? `ejected until ${clock(now() + due)}` : "ejected, its next request is a trial") + why);
  }
  if (worker.circuit !== "closed") return said("warn", `on trial with one request${why}`, true);
  if (worker.ranks.every((rank) => rank.busy)) return said("warn", "busy, gets no new requests");
  return worker.condition ? said("good", "healthy", true) : said("warn", "joining");
}

const KNOWN = ["exact", "degraded", "approximate"];

function blocks(ranks) {
  const worst = ranks.reduce((one, other) =>
    KNOWN.indexOf(other.index) > KNOWN.indexOf(one.index) ? other : one);
  const held = make("span", number(ranks.reduce((sum, rank) => sum + rank.blocks, 0)));
  if (worst.index !== "exact") held.append(" ", make("span", `${worst.index}: ${worst.reason}`, "quiet"));
  return held;
}

function meter(share) {
  if (share === null) return "–";
  const held = make("span");
  const element = make("meter");
  element.value = share;
  element.setAttribute("aria-label", "KV cache in use");
  held.append(element, ` ${percent(share)}`);
  return held;
}

const ours = (ranks) => number(ranks.reduce((sum, rank) => sum + rank.own.requests, 0));

function workerRows(table, worker) {
  const { worker_id: id, ranks } = worker;
  const well = health(worker);
  const focus = `worker ${id} ${worker.incarnation}`;
  const rows = [{
    key: focus,
    state: [worker, well, open.has(focus), shown.several],
    draw() {
      const name = make("span", id);
      if (shown.several) name.append(" ", make("span", worker.model, "quiet"));
      if (ranks.length > 1) name.append(" ", toggle(focus, `${ranks.length} ranks of ${id}`));
      const said = make("span", well.text, well.kind);
      const line = row(table, !ranks.length ? [name, said, "", "", "", "", "", "", ""] : [
        name, said, number(worker.running), number(worker.waiting),
        ours(ranks), meter(worker.kv_usage), blocks(ranks),
        number(worker.media) + (worker.transport ? `, sent by ${worker.transport}` : ""),
        button("Operations…", `Operations of ${id}`, () => showOperations(worker)),
      ]);
      line.dataset.worker = id;
      return line;
    },
  }];
  if (ranks.length > 1 && open.has(focus)) {
    rows.push(...ranks.map((rank) => ({
      key: `${focus} rank ${rank.rank}`,
      state: rank,
      draw() {
        const line = row(table, [
          `rank ${rank.rank}`, rank.busy ? "busy" : "", number(rank.running),
          number(rank.waiting), ours([rank]), meter(rank.kv_usage), blocks([rank]), "", "",
        ]);
        line.className = "part";
        return line;
      },
    })));
  }
  return rows;
}

// A reason where the worker's name and what became of it stand already.
const short = (one) => one.reason.replace(/^worker .*? refused: /, "");

const WORST = { bad: 0, warn: 1, good: 2, quiet: 3 };

function drawWorkers({ workers, refused }) {
  const table = find("workers");
  const others = refused.map((one) => [one.worker_id, make("span", `refused: ${short(one)}`, "bad")]);
  const sorted = workers
    .map((worker) => ({ worker, rank: WORST[health(worker).kind] }))
    .sort((one, other) => one.rank - other.rank ||
      one.worker.worker_id.localeCompare(other.worker.worker_id, "en", { numeric: true }));
  const none = { key: "none", state: 0, draw: () => row(table, ["None yet.", ...Array(8).fill("")]) };
  fill(table, others.length + sorted.length === 0 ? [none] : [
    ...others.map(([id, told], place) => ({
      key: `other ${place} ${id}`,
      state: told.textContent,
      draw() {
        const line = row(table, [id, told, "", "", "", "", "", "", ""]);
        line.dataset.worker = id;
        return line;
      },
    })),
    ...sorted.flatMap(({ worker }) => workerRows(table, worker)),
  ]);
}

// Whether all is well, in one sentence.

const ERRORS = [
  ["status_429", "429"], ["status_503", "503"], ["status_4xx", "other 4xx"],
  ["status_5xx", "other 5xx"], ["broken", "cut off"],
];

function sums(history, name) {
  return history.slice(-MINUTE).reduce((sum, step) => sum + step[name], 0);
}

const answers = (step) => ERRORS.reduce((sum, [name]) => sum + step[name], step.ok);

function verdict({ summary, workers, refused, history }) {
  const bad = [], warn = [];
  const told = workers.filter((worker) => worker.state !== "left").map((worker) => ({ worker, well: health(worker) }));
  const away = told.filter(({ well }) => !well.takes);
  const named = away.map(({ worker, well }) =>
    `${worker.worker_id} ${worker.gone_at === null ? "is" : "was"} ${well.text}`);
  const names = named.slice(0, 3).join("; ") + (named.length > 3 ? `; and ${named.length - 3} more` : "");
  const taking = told.length - away.length;
  if (!taking) {
    // Where all others are out, those that are ejected get requests all the same.
    const ejected = told.some(({ worker, well }) => well.kind === "bad" && worker.connected);
    bad.push(ejected ? `no worker is healthy, those that are ejected get all requests (${names})`
      : named.length ? `no worker takes requests: clients get 503 (${names})`
      : `no worker ${refused.length ? "takes requests" : "has registered"}: clients get 503`);
  } else {
    for (const model of summary.models) {
      if (!told.some(({ worker, well }) => well.takes && worker.model === model)) {
        bad.push(`no worker of ${model} takes requests`);
      }
    }
    if (named.length) warn.push(`${plural(taking, "worker")} of ${told.length} take requests (${names})`);
  }
  if (refused.length) warn.push(`${plural(refused.length, "worker")} refused: see Workers`);
  const minute = Object.fromEntries(ERRORS.map(([name]) => [name, sums(history, name)]));
  const all = history.slice(-MINUTE).reduce((sum, step) => sum + answers(step), 0);
  const failed = ["status_503", "status_5xx", "broken"].filter((name) => minute[name]);
  const failures = failed.reduce((sum, name) => sum + minute[name], 0);
  if (failures) {
    const kinds = failed.map((name) => `${Object.fromEntries(ERRORS)[name]}: ${minute[name]}`);
    (failures > FAILING * all ? bad : warn).push(
      `${number(failures)} of ${plural(all, "request")} failed in the last minute (${kinds.join(", ")})`,
    );
  }
  if (minute.status_429) {
    warn.push(`${number(minute.status_429)} of ${plural(all, "request")} got 429 in the last minute: too many at once`);
  }
  const problems = [...bad, ...warn];
  if (problems.length) {
    return { kind: bad.length ? "bad" : "warn", text: `${bad.length ? "Not well" : "Attention"}: ${problems.join(". ")}.` };
  }
  const blamed = minute.status_4xx ? `, ${number(minute.status_4xx)} were refused for what they ask` : "";
  return {
    kind: "good",
    text: `Well: ${told.length === 1 ? "the worker takes" : `all ${told.length} workers take`} requests; ` +
      (all ? `none of ${plural(all, "request")} failed in the last minute${blamed}.` : "none came in the last minute."),
  };
}

// Plots.

function niceTop(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].find((one) => one * power >= most * 0.999) * power;
}

const SVG = "http://www.w3.org/2000/svg";

function drawn(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [one, value] of Object.entries(attributes)) element.setAttribute(one, value);
  return element;
}

// Points that follow one another; those without a value leave a gap.
function segments(values) {
  const found = [];
  values.forEach((value, step) => {
    if (value === null) return;
    if (step && values[step - 1] !== null) found.at(-1).push([step, value]);
    else found.push([[step, value]]);
  });
  return found;
}

// Lines over the last quarter of an hour, each a name and its values; null where there is none.
function plot(title, latest, show, lines, fixedTop) {
  const figure = make("figure");
  const caption = make("figcaption");
  caption.append(make("span", title), make("strong", latest));
  const most = Math.max(0, ...lines.flatMap(([, values]) => values).filter((value) => value !== null));
  const top = fixedTop || niceTop(most || 1);
  const drawing = drawn("svg", {
    viewBox: `0 0 ${STEPS - 1} 1`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}: ${latest} in the last minute, at most ${show(most)} in a quarter of an hour`,
  });
  drawing.append(drawn("path", {
    class: "grid", d: `M0 0H89M0 .5H89M0 1H89M0 0V1M${89 / 3} 0V1M${178 / 3} 0V1M89 0V1`,
  }));
  lines.forEach(([, values], place) => {
    for (const points of segments(values)) {
      if (points.length === 1) points.push([points[0][0] + 0.5, points[0][1]]);
      drawing.append(drawn("polyline", {
        class: `line${place}`, points: points.map(([step, value]) => `${step},${1 - value / top}`).join(" "),
      }));
    }
  });
  const scale = make("div", "", "scale");
  scale.append(make("span", show(top)), make("span", show(top / 2)), make("span", show(0)));
  const axis = make("div", "", "axis");
  axis.append(...["15 min ago", "10", "5", "now"].map((text) => make("span", text)));
  const held = make("div", "", "plot");
  held.append(scale, drawing, axis);
  figure.append(caption, held);
  if (lines.length > 1) {
    const names = make("p", "", "lines");
    lines.forEach(([name], place) => {
      const sample = drawn("svg", { viewBox: "0 0 20 1", preserveAspectRatio: "none", "aria-hidden": "true" });
      sample.append(drawn("path", { class: `line${place}`, d: "M0 .5H20" }));
      const one = make("span");
      one.append(sample, name);
      names.append(one);
    });
    figure.append(names);
  }
  return figure;
}

// The seconds within which a share of first tokens came, as Prometheus does from a histogram.
function quantile(share, within, edges) {
  const all = within.at(-1);
  if (!all) return null;
  const place = within.findIndex((count) => count >= share * all);
  if (place >= edges.length) return edges.at(-1);
  const [edge, below] = place ? [edges[place - 1], within[place - 1]] : [0, 0];
  return edge + ((edges[place] - edge) * (share * all - below)) / (within[place] - below);
}

function drawPlots(history, edges) {
  // By the server's clock: the browser's may be minutes off.
  const end = Math.max(...history.map((one) => one.at), 0);
  const at = new Map(history.map((one) => [one.at, one]));
  const steps = Array.from({ length: STEPS }, (_, place) => at.get(end - (STEPS - 1 - place) * STEP_S));
  const each = (read) => steps.map((step) => (step ? read(step) : null));
  const minute = (read) => history.slice(-MINUTE).reduce((sum, step) => sum + read(step), 0);
  const passed = Math.max(1, Math.min(MINUTE, history.length)) * STEP_S;
  const perSecond = (name) => few(minute((step) => step[name]) / passed);
  const ratio = (name) => (step) => (step.prompt_tokens ? Math.min(1, step[name] / step.prompt_tokens) : null);
  const prompts = minute((step) => step.prompt_tokens);
  const share = (name) => (prompts ? percent(minute((step) => step[name]) / prompts) : "–");
  // Each over the minute that ends there: ten seconds have few requests.
  const waited = (portion) => steps.map((step, place) => {
    const some = steps.slice(Math.max(0, place - MINUTE + 1), place + 1).filter(Boolean);
    if (!step || !some.length) return null;
    const within = some[0].first_token_within.map((_, edge) =>
      some.reduce((sum, one) => sum + one.first_token_within[edge], 0));
    return quantile(portion, within, edges);
  });
  const [p50, p99] = [waited(0.5), waited(0.99)];
  const errors = (step) => answers(step) - step.ok;
  const quarter = (name) => history.reduce((sum, step) => sum + step[name], 0);
  find("plots").replaceChildren(
    plot("Requests per second", few(minute(answers) / passed), few, [
      ["answered", each((step) => answers(step) / STEP_S)],
    ]),
    plot("Errors in 10 s", `${number(minute(errors))} in a minute`, few, ERRORS.map(
      ([name, text]) => [`${text}: ${number(quarter(name))}`, each((step) => step[name])],
    )),
    plot("First token", `p50 ${seconds(p50.at(-1))}, p99 ${seconds(p99.at(-1))}`, seconds, [
      ["p50", p50], ["p99", p99],
    ]),
    plot("Tokens per second", `${perSecond("output_tokens")} out, ${perSecond("prompt_tokens")} in`, few, [
      ["output", each((step) => step.output_tokens / STEP_S)],
      ["prompt", each((step) => step.prompt_tokens / STEP_S)],
    ]),
    plot("Prefix cache hits", `${share("realised")}, predicted ${share("predicted")}`, percent, [
      ["realised", each(ratio("realised"))], ["predicted", each(ratio("predicted"))],
    ], 1),
    drawNow(),
  );
}

function list(name, facts) {
  const element = make("dl");
  element.id = name;
  for (const [term, fact] of facts) element.append(make("dt", term), make("dd", fact));
  return element;
}

function drawNow() {
  const sum = (name) => number(shown.workers.reduce((all, one) => all + (one[name] || 0), 0));
  const usage = Math.max(...shown.workers.map((one) => one.kv_usage || 0), 0);
  return list("now", [
    ["Requests in flight", sum("active_requests")], ["Running on workers", sum("running")],
    ["Waiting on workers", sum("waiting")], ["Fullest KV cache", percent(usage)],
    ["Media held by workers", sum("media")],
  ]);
}

// Events, of all processes: what several say at about the same time is one.

function merged(events) {
  const found = [];
  for (const one of events) {
    const same = found.find((other) => other.worker_id === one.worker_id &&
      other.what === one.what && other.reason === one.reason && other.at - one.at < 5);
    if (!same) found.push({ ...one, processes: [one.process] });
    else if (!same.processes.includes(one.process)) same.processes.push(one.process);
    else found.push({ ...one, processes: [one.process] });
  }
  return found;
}

const EVENT_KINDS = {
  joined: "good", reinstated: "good", lost: "bad", refused: "bad", ejected: "bad", drained: "warn",
};

function drawEvents(events) {
  const table = find("events");
  fill(table, some("events", events).map((one, place) => ({
    key: `${place}`,
    state: [one, Math.floor((now() - one.at) / 10)],
    draw: () => row(table, [
      `${clock(one.at)}, ${duration(now() - one.at)} ago`, one.worker_id,
      make("span", one.what, EVENT_KINDS[one.what] || "quiet"),
      one.reason + (one.processes[0] === undefined ? "" : ` (process ${one.processes.join(", ")})`),
    ]),
  })));
  if (!events.length) fill(table, [{ key: "none", state: 0, draw: () => row(table, ["None yet.", "", "", ""]) }]);
}

// Decisions.

const WHY = {
  "kv-overlap": "it has the start of the prompt", media: "it has the media", load: "it has least to do",
  spread: "others would queue it", "only-worker": "there is no other", "round-robin": "each in turn",
};
const PARTS = {
  prefill: "prefill", encode: "encode", ship: "send", load: "prefilling", decode: "decoding",
  queue: "queued", step: "step",
};

const target = (one) => (one.rank ? `${one.worker_id} / ${one.rank}` : one.worker_id);
const isChosen = (decision, one) => one.worker_id === decision.worker_id && one.rank === decision.rank;

function bar(candidate, most) {
  const element = make("div", "", "bar");
  for (const name of Object.keys(PARTS)) {
    const part = make("i", "", name);
    part.style.width = `${(100 * candidate.costs[name]) / most}%`;
    element.append(part);
  }
  return element;
}

function costs(decision) {
  const most = Math.max(1, ...decision.candidates.map((one) => one.cost));
  const held = make("div", "", "costs");
  for (const one of decision.candidates) {
    const chosen = isChosen(decision, one);
    held.append(
      make("span", target(one), chosen ? "chosen" : ""),
      make("span", rounded(one.cost) + (chosen ? " ← chosen" : "")), bar(one, most),
    );
  }
  return held;
}

function parts(decision) {
  const table = make("table");
  table.setAttribute("role", "table");
  const head = table.createTHead().insertRow();
  for (const name of ["Candidate", "Cost", "Blocks held", ...Object.values(PARTS)]) {
    const cell = make("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  for (const one of decision.candidates) {
    const line = row(table, [
      target(one), rounded(one.cost), number(one.overlap_blocks),
      ...Object.keys(PARTS).map((name) => rounded(one.costs[name])),
    ]);
    if (isChosen(decision, one)) line.className = "chosen";
    table.append(line);
  }
  return table;
}

function decisionMore(table, decision) {
  const media = decision.media.map(
    (item) => `${item.how}${item.transport && ` by ${item.transport}`}${item.nbytes ? ` ${bytes(item.nbytes)}` : ""}`,
  );
  const held = make("div");
  held.append(
    make("p", `Request ${decision.request_id}, decided in ${rounded(decision.micros)} µs by ${decision.mode} ` +
      `among ${plural(decision.candidates_total, "candidate")}` +
      (decision.candidates_total > decision.candidates.length ? ", the cheapest are shown" : "") +
      (decision.process === undefined ? "." : `, by process ${decision.process}.`), "quiet"),
    make("p", `Media: ${media.join(", ") || "none"}.`, "quiet"), parts(decision),
  );
  const line = make("tr");
  const cell = make("td");
  line.setAttribute("role", "row");
  cell.setAttribute("role", "cell");
  cell.colSpan = table.tHead.rows[0].cells.length;
  cell.append(held);
  line.append(cell);
  return line;
}

function drawDecisions(decisions) {
  const table = find("decisions");
  const rows = some("decisions", decisions).flatMap((one) => {
    const name = `decision ${one.time} ${one.request_id} ${one.process}`;
    const { realised_cached_tokens: cached, predicted_first_token_s: expected } = one;
    return [{
      key: name,
      state: [one, open.has(name)],
      draw() {
        const why = make("span", one.reason);
        if (WHY[one.reason]) why.append(make("span", `: ${WHY[one.reason]}`, "quiet"));
        const line = row(table, [
          clock(one.time), target(one), why,
          number(one.prompt_tokens) + (one.media.length ? ` + ${one.media.length} media` : ""),
          `${number(cached)} (${number(one.predicted_cached_tokens)})`,
          seconds(one.first_token_s) + (expected === null ? "" : ` (${seconds(expected)})`),
          costs(one), toggle(name, `decision at ${clock(one.time)} for ${one.request_id}`),
        ]);
        line.dataset.request = one.request_id;
        return line;
      },
    }, ...(open.has(name) ? [{ key: `${name} more`, state: one, draw: () => decisionMore(table, one) }] : [])];
  });
  fill(table, rows.length ? rows : [
    { key: "none", state: 0, draw: () => row(table, ["None yet.", "", "", "", "", "", "", ""]) },
  ]);
}

// Media, from the metrics: only while somebody looks, since they may be many.

function by(text, name, label) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z0-9_:]+)(?:\{(.*)\})? ([^ ]+)/.exec(line);
    if (!match || match[1] !== name) continue;
    const value = new RegExp(`(?:^|,)${label}="((?:[^"\\\\]|\\\\.)*)"`).exec(match[2] || "")?.[1] || "";
    found.set(value, (found.get(value) || 0) + Number(match[3]));
  }
  return [...found].filter(([, count]) => count);
}

function drawMedia(text) {
  const of = (name, label, show) =>
    by(text, name, label).map(([value, count]) => `${value} ${show(count)}`).join(", ") || "nothing yet";
  const total = (name) => by(text, name, "").reduce((sum, [, count]) => sum + count, 0);
  const facts = list("media-facts", [
    ["Arena", `${bytes(total("mmrouter_arena_bytes_used"))} of ${bytes(total("mmrouter_arena_bytes"))} in use, ` +
      `${plural(total("mmrouter_arena_leases"), "lease")}`],
    ["Bytes sent by", of("mmrouter_tensor_bytes_sent_total", "transport", bytes)],
    ["Items by way", of("mmrouter_media_items_total", "how", number)],
    ["Fell back", of("mmrouter_transfer_fallbacks_total", "reason", number)],
  ]);
  find("media-facts").replaceWith(facts);
}

// Operations: what each asks for, one after the other, and what that does.

const OPERATIONS = {
  drain: [["drain"], (worker) =>
    "It gets no new requests from this frontend until it is reinstated or starts again. " +
    `The ${plural(worker.active_requests, "request")} that it has from here finish. Other frontends go on sending to it.`],
  eject: [["eject"], () =>
    "It gets no new requests from this frontend for a while, as after errors; then one request tries it. " +
    "What it has goes on. Other frontends go on sending to it."],
  reinstate: [["reinstate"], () => "It gets requests from this frontend again, whatever kept them from it."],
  pause: [["pause"], (worker) =>
    `It finishes the ${plural(worker.running || 0, "request")} that it runs, drops its caches, and computes nothing until it is resumed. ` +
    "That is so for all frontends: their requests go to other workers."],
  resume: [["resume"], () => "It computes again, for all frontends."],
  sleep: [["sleep"], (worker) =>
    `It finishes the ${plural(worker.running || 0, "request")} that it runs, moves its weights to host memory and drops its caches, until it is woken up. ` +
    "That is so for all frontends. It needs --enable-sleep-mode."],
  "wake up": [["wake_up"], () => "It takes its weights back and computes again, for all frontends."],
  "reset caches": [["reset_prefix_cache", "reset_mm_cache"], () =>
    "It forgets all blocks and media that it holds: for all frontends the next requests take as long as new ones. " +
    "It refuses while requests use blocks."],
};

function operationsOf(worker) {
  const out = worker.drained || worker.circuit !== "closed";
  const condition = { paused: ["resume"], asleep: ["wake up"] }[worker.condition] || ["pause", "sleep"];
  return [...(out ? ["reinstate"] : ["drain", "eject"]), ...condition, "reset caches"];
}

function showDialog(title, ...body) {
  find("dialog-title").textContent = title;
  find("dialog-body").replaceChildren(...body);
  find("dialog-confirm").hidden = true;
  if (!find("dialog").open) find("dialog").showModal();
}

function showOperations(worker) {
  const rows = operationsOf(worker).map((name) => {
    const line = make("div", "", "operation");
    line.append(
      button(`${name}…`, `${name} ${worker.worker_id}`, () => confirmOperation(worker, name)),
      make("span", OPERATIONS[name][1](worker), "quiet"),
    );
    return line;
  });
  showDialog(`Operations of ${worker.worker_id}`, ...rows);
}

function confirmOperation(worker, name) {
  const only = !shown.workers.some(
    (one) => one.worker_id !== worker.worker_id && health(one).takes,
  );
  const stops = ["drain", "eject", "pause", "sleep"].includes(name);
  showDialog(
    `${name} ${worker.worker_id}?`, make("p", OPERATIONS[name][1](worker)),
    ...(only && stops ? [make("p", "No other worker takes requests: clients will get 503.", "bad")] : []),
  );
  const confirm = find("dialog-confirm");
  confirm.textContent = `${name} ${worker.worker_id}`;
  confirm.hidden = false;
  confirm.onclick = () => operate(worker.worker_id, name);
  find("dialog-cancel").focus();
}

let told = 0; // when the outcome of an operation may go

function tell(text, kind) {
  find("done").textContent = text;
  find("done").className = kind;
  find("done").hidden = false;
  told = Date.now() + HOLD_MS;
}

async function operate(worker, name) {
  find("dialog").close();
  try {
    for (const route of OPERATIONS[name][0]) {
      tell(`${name} ${worker}: asked, no answer yet`, "warn");
      await post(`mmrouter/workers/${encodeURIComponent(worker)}/${route}`);
    }
    tell(`${name} ${worker}: done`, "good");
    update();
  } catch (error) {
    tell(`${name} ${worker}: ${error.message}`, "bad");
  }
}

// All of it.

let shown = null; // what was told last
let nextSlow = 0; // when to ask again for what changes every ten seconds

function say(kind, text) {
  const state = find("state");
  if (state.textContent === text && state.className === kind) return; // or it would be read out again
  state.textContent = text;
  state.className = kind;
}

function drawFacts({ summary }) {
  const facts = [
    [summary.models.length > 1 ? "Models" : "Model", summary.models.join(", ") || "none yet"],
    ["Version", summary.version],
    ["Frontend", `${summary.host}, ${plural(summary.processes, "process").replace("processs", "processes")}`],
    ["Routing", summary.mode], ["Up", duration(now() - summary.started)],
  ];
  find("facts").replaceChildren(...facts.map(([term, fact]) => {
    const held = make("div");
    held.append(make("dt", term), make("dd", fact));
    return held;
  }));
}

function draw() {
  const { kind, text } = verdict(shown);
  say(kind, text);
  document.title = `${{ good: "✓", warn: "▲", bad: "✕" }[kind]} mmrouter ${shown.summary.models.join(", ")}`;
  drawFacts(shown);
  drawEvents(shown.events);
  drawWorkers(shown);
  drawDecisions(shown.decisions);
  if (shown.metrics !== null) drawMedia(shown.metrics);
  if (Date.now() > told) find("done").hidden = true;
}

async function load() {
  const slow = Date.now() >= nextSlow;
  const [workers, refused, events, decisions, summary, history, metrics] = await Promise.all([
    json("mmrouter/workers"), json("mmrouter/workers/refused"), json("mmrouter/events?last=100"),
    json(`mmrouter/decisions?last=${SHOWN}&candidates=${CANDIDATES}`),
    slow ? json("mmrouter/summary") : shown.summary,
    slow ? json("mmrouter/history") : shown.history,
    slow && find("media").open ? get("metrics").then((answer) => answer.text()) : shown && shown.metrics,
  ]);
  if (slow) {
    ahead = summary.now - Date.now() / 1000;
    nextSlow = Date.now() + 1000 * STEP_S - PERIOD_MS / 2;
  }
  const several = new Set(workers.map((one) => one.model)).size > 1;
  shown = { workers, refused, decisions, summary, history, metrics, several, events: merged(events) };
  draw();
  if (slow) drawPlots(history, summary.first_token_edges_s);
}

function hide(error) {
  // Nothing that was shown to whoever had a key stays.
  shown = null;
  nextSlow = 0;
  find("content").hidden = true;
  for (const place of ["plots", "facts", "media-facts"]) find(place).replaceChildren();
  for (const table of ["workers", "events", "decisions"]) find(table).tBodies[0].replaceChildren();
  find("dialog").close();
  document.title = "mmrouter status";
  find("key-form").hidden = !error.keyHelps;
  say("bad", error.keyHelps
    ? `${key ? "This key does not open it. " : ""}The page needs a key of --admin-key-file, or where there is none of --api-key-file.`
    : error.message);
}

async function update() {
  clearTimeout(timer);
  if (document.hidden) return; // nobody looks
  const begun = Date.now();
  try {
    await load();
    find("content").hidden = false;
    find("key-form").hidden = true;
  } catch (error) {
    if (error.refused) hide(error);
    else say("bad", `No answer: ${error.message}. What is shown is old.`);
  }
  find("forget-key").hidden = !key || find("content").hidden;
  clearTimeout(timer);
  // A large fleet, or a frontend with much to do, is asked less often.
  timer = setTimeout(update, Math.max(PERIOD_MS, 10 * (Date.now() - begun)));
}

function useKey(text) {
  key = text;
  find("key").value = "";
  sessionStorage.setItem("mmrouter-admin-key", key);
  nextSlow = 0;
  update();
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(find("key").value.trim());
});
find("forget-key").addEventListener("click", () => useKey(""));
find("dialog-cancel").addEventListener("click", () => find("dialog").close());
for (const name of Object.keys(FIRST)) find(`more-${name}`).addEventListener("click", () => turn(name));
find("media").addEventListener("toggle", () => {
  nextSlow = 0;
  update();
});
document.addEventListener("visibilitychange", update);

update();
