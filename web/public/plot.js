// Lines of counts over time, drawn with SVG: a plot with axes, and sparklines.

const SVG = 'http://www.w3.org/2000/svg';

/** Adds an element to a drawing. */
export function make(parent, name, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

/** The least round number that is at least n: 4, 10, 20, 50, 100, … */
export function roundUp(n) {
  for (let unit = 1; ; unit *= 10)
    for (const step of [1, 2, 4, 5]) if (step * unit >= Math.max(n, 4)) return step * unit;
}

/** How one count changed over the last ten minutes. A count holds until the next; null is a gap. */
export class Plot {
  #svg;
  #points = []; // {at, count}
  #bound = 3_000; // beyond that the oldest go; more than four a second do not come
  // The stretch of time that is shown grows with what there is to show.
  #spans = [
    [30e3, '30 s ago'],
    [60e3, '1 min ago'],
    [120e3, '2 min ago'],
    [300e3, '5 min ago'],
    [600e3, '10 min ago'],
  ];
  #grid;
  #area;
  #line;
  #cross;
  #tip;
  #pointer; // where in the plot someone points, in pixels

  constructor(svg) {
    this.#svg = svg;
    this.#grid = make(svg, 'g', { class: 'grid' });
    this.#area = make(svg, 'path', { class: 'area' });
    this.#line = make(svg, 'path', { class: 'line' });
    this.#cross = make(svg, 'path', { class: 'cross' });
    this.#tip = make(svg, 'text', { class: 'tip' });
    new ResizeObserver(() => this.draw()).observe(svg);
    svg.addEventListener('pointermove', (event) => {
      this.#pointer = event.clientX - svg.getBoundingClientRect().left;
      this.draw();
    });
    svg.addEventListener('pointerleave', () => {
      this.#pointer = undefined;
      this.draw();
    });
  }

  clear() {
    this.#points = [];
    this.draw();
  }

  /**
   * What was before the first count that was added: greatest counts of minutes, {ago in ms, count}, the oldest first.
   */
  begin(minutes) {
    const now = performance.now();
    const first = this.#points[0]?.at ?? now;
    const before = minutes.map(({ ago, count }) => ({ at: now - ago, count })).filter((point) => point.at < first);
    while (before[0]?.count === 0) before.shift(); // nobody had been there yet
    this.#points.unshift(...before);
    this.draw();
  }

  add(count) {
    if (this.#points.at(-1)?.count === count) return;
    this.#points.push({ at: performance.now(), count });
    this.draw();
  }

  draw() {
    const { width, height } = this.#svg.getBoundingClientRect();
    if (!width) return;
    const now = performance.now();
    const points = this.#points;
    const most = this.#spans.at(-1)[0];
    // The first point may lie before the stretch: its count reaches into it.
    while (points.length > this.#bound || (points.length > 1 && points[1].at < now - most)) points.shift();
    const age = Math.min(now - (points[0]?.at ?? now), most);
    const [span, since] = this.#spans.find(([span]) => age <= span);
    const top = roundUp(Math.max(...points.map((p) => p.count ?? 0)));
    const [left, right, bottom, above] = [8 + 8 * String(top).length, width - 4, height - 20, 8];
    const x = (at) => Math.max(left, right - ((now - at) / span) * (right - left)).toFixed(1);
    const y = (count) => (bottom - (count / top) * (bottom - above)).toFixed(1);

    this.#grid.replaceChildren();
    for (const count of [0, top / 2, top]) {
      make(this.#grid, 'path', { d: `M${left} ${y(count)}H${right}` });
      make(this.#grid, 'text', { x: left - 6, y: +y(count) + 4, class: 'end' }).textContent =
        count.toLocaleString('en');
    }
    make(this.#grid, 'text', { x: left, y: height - 3 }).textContent = since;
    make(this.#grid, 'text', { x: right, y: height - 3, class: 'end' }).textContent = 'now';

    let line = '';
    let area = '';
    points.forEach(({ at, count }, i) => {
      if (count === null) return;
      const to = x(points[i + 1]?.at ?? now);
      const joins = i > 0 && points[i - 1].count !== null;
      line += `${joins ? 'V' : `M${x(at)} `}${y(count)}H${to}`;
      area += `M${x(at)} ${bottom}V${y(count)}H${to}V${bottom}Z`;
    });
    this.#line.setAttribute('d', line);
    this.#area.setAttribute('d', area);
    this.#point(now, span, left, right, bottom, above);
  }

  /** Says what the count was where someone points. */
  #point(now, span, left, right, bottom, above) {
    const px = this.#pointer;
    const at = now - ((right - px) / (right - left)) * span;
    const point = px >= left && px <= right ? this.#points.findLast((p) => p.at <= at) : undefined;
    const shown = point && point.count !== null;
    this.#cross.setAttribute('d', shown ? `M${px} ${above}V${bottom}` : '');
    this.#tip.textContent = shown ? `${point.count.toLocaleString('en')}, ${Math.round((now - at) / 1e3)} s ago` : '';
    this.#tip.classList.toggle('end', px > (left + right) / 2);
    this.#tip.setAttribute('x', px > (left + right) / 2 ? px - 6 : (px ?? 0) + 6);
    this.#tip.setAttribute('y', above + 6);
  }
}

/** Draws counts, taken at equal times, as a small line that ends at the right. */
export function sparkline(svg, counts, length) {
  const path = svg.querySelector('path') ?? make(svg, 'path', { class: 'line' });
  svg.setAttribute('viewBox', '0 0 100 20');
  svg.setAttribute('preserveAspectRatio', 'none');
  const top = Math.max(...counts, 1);
  const x = (i) => (100 - ((counts.length - 1 - i) * 100) / (length - 1)).toFixed(1);
  path.setAttribute(
    'd',
    counts.map((count, i) => `${i ? 'L' : 'M'}${x(i)} ${(19 - (18 * count) / top).toFixed(1)}`).join(''),
  );
}
