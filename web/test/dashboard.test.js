// The dashboard, on a document of this test in which only texts are kept.
import assert from 'node:assert/strict';
import { mock, test } from 'node:test';

import { element, settle } from './fake.js';

test('rates are not negative when another process answers, whose clock is behind', async () => {
  const elements = new Map();
  const all = (id) => elements.get(id) ?? elements.set(id, element()).get(id);
  const answers = [];
  Object.assign(globalThis, {
    location: new URL('https://count.example/-/dashboard'),
    sessionStorage: { getItem: () => 'a key' },
    addEventListener() {},
    ResizeObserver: class { observe() {} },
    Option: class {},
    document: {
      hidden: false, getElementById: all, addEventListener() {}, createElement: element, createElementNS: element,
    },
    fetch: async (url) =>
      url.endsWith('/-/dashboard/data') ? Response.json(answers.shift()) : new Response('', { status: 404 }),
  });
  mock.timers.enable({ apis: ['setInterval'] });
  const board = (at, delivered) => ({
    at, region: 'eu', state: { level: 'good', text: 'all is well' }, site: { count: 1 }, pages: [], regions: [],
    events: [],
    processes: [{ name: 'a', since: 1, roles: [], load: { headcount_deliveries_total: delivered } }],
  });
  answers.push(board(10_000, 100), board(12_000, 120), board(11_000, 130), board(13_000, 140));
  await import('../public/dashboard.js');
  const seen = [];
  for (let i = 0; i < 4; i++) {
    await settle();
    seen.push(all('deliveries').textContent);
    mock.timers.tick(1_000);
  }
  mock.timers.reset();
  assert.deepEqual(seen, ['–', '10', '–', '5']);
});
