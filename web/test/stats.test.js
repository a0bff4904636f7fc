// What the dashboard and the demo say of the past of a page.
import assert from 'node:assert/strict';
import { test } from 'node:test';

import { summary } from '../public/stats.js';

const day = (number, visitors) => ({
  at: `2030-10-0${number}T00:00:00Z`, max: 1, joins: visitors, avg: 1, person_minutes: 1440, visitors,
});

test('of days on which nobody came, but somebody was there, the summary has a number', () => {
  const peak = { count: 1, at: day(1).at };
  const of = (...points) => {
    const visitors = points.reduce((sum, point) => sum + point.visitors, 0);
    return summary({ peak, points, visitors }, '7 days');
  };
  assert.match(of(day(1, 0), day(2, 0)), /^Last 7 days: at most 1 on .*, 0 visitors on a day with any, 48 person-hours$/);
  assert.match(of(day(1, 3), day(2, 0)), /, 3 visitors on a day with any, /);
});
