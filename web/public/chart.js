// What was, drawn with axes: the greatest count of each step of time, and of days the mean count.

import { make, roundUp } from './plot.js';
import { date, isDay } from './stats.js';

const clock = (at) => at.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
const day = (at) => at.toLocaleDateString([], { weekday: 'short', day: 'numeric' });
const number = (n) => n.toLocaleString('en', { maximumFractionDigits: 1 });

/** Says what a point says. */
function say({ at, max, joins, ...of }) {
  if (!isDay(of)) return `${day(at)} ${clock(at)}: at most ${number(max)}, ${number(joins)} came`;
  return `${date(at)}: at most ${number(max)}, mean ${number(of.avg)}, ${number(of.visitors)} visitors, ${number(of.person_minutes / 60)} person-hours`;
}

/** Draws points of the server's statistics, the oldest first. */
export class Chart {
  #svg;
  #points = [];
  #pointer; // where someone points, in pixels

  constructor(svg) {
    this.#svg = svg;
    new ResizeObserver(() => this.#draw()).observe(svg);
    svg.addEventListener('pointermove', (event) => this.#point(event.clientX - svg.getBoundingClientRect().left));
    svg.addEventListener('pointerleave', () => this.#point(undefined));
  }

  show(points) {
    this.#points = points.map((point) => ({ ...point, at: new Date(point.at) }));
    this.#draw();
  }

  #point(x) {
    this.#pointer = x;
    this.#draw();
  }

  #draw() {
    const svg = this.#svg;
    const { width, height } = svg.getBoundingClientRect();
    const points = this.#points;
    svg.replaceChildren();
    if (!width || points.length < 2) return;
    const top = roundUp(Math.max(...points.map((p) => p.max)));
    const [left, right, bottom, above] = [8 + 8 * String(top).length, width - 4, height - 20, 8];
    const x = (i) => left + (i / (points.length - 1)) * (right - left);
    const y = (count) => bottom - (count / top) * (bottom - above);
    const grid = make(svg, 'g', { class: 'grid' });
    for (const count of [0, top / 2, top]) {
      make(grid, 'path', { d: `M${left} ${y(count)}H${right}` });
      make(grid, 'text', { x: left - 6, y: y(count) + 4, class: 'end' }).textContent = count.toLocaleString('en');
    }
    const days = isDay(points[0]);
    const label = days ? date : points.at(-1).at - points[0].at > 2 * 86_400_000 ? day : clock;
    const labels = Math.max(2, Math.min(7, Math.floor((right - left) / 90)));
    for (let n = 0; n < labels; n++) {
      const i = Math.round((n / (labels - 1)) * (points.length - 1));
      make(grid, 'text', {
        x: x(i),
        y: height - 3,
        class: ['', 'middle', 'end'][n === 0 ? 0 : n === labels - 1 ? 2 : 1],
      }).textContent = label(points[i].at);
    }
    const path = (of) => points.map((p, i) => `${i ? 'L' : 'M'}${x(i).toFixed(1)} ${y(of(p)).toFixed(1)}`).join('');
    const line = path((p) => p.max);
    make(svg, 'path', { class: 'area', d: `${line}L${right} ${bottom}L${left} ${bottom}Z` });
    make(svg, 'path', { class: 'line', d: line });
    if (days) make(svg, 'path', { class: 'mean', d: path((p) => p.avg) });
    const i = Math.round(((this.#pointer - left) / (right - left)) * (points.length - 1));
    if (!points[i]) return; // nobody points, or beside it
    const end = i > points.length / 2;
    make(svg, 'path', { class: 'cross', d: `M${x(i)} ${above}V${bottom}` });
    const tip = { class: end ? 'tip end' : 'tip', x: x(i) + (end ? -6 : 6), y: above + 6 };
    make(svg, 'text', tip).textContent = say(points[i]);
  }
}
