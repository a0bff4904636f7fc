// The dashboard, on a document of this test in which only texts are kept.
import assert from 'node:assert/strict';
import { afterEach, mock, test } from 'node:test';

import { element, settle } from './fake.js';

/** A dashboard whose server gives these answers, one a second. Returns its elements. */
let made = 0;
async function dashboard(answers) {
  const elements = new Map();
  const all = (id) => elements.get(id) ?? elements.set(id, element()).get(id);
  Object.assign(globalThis, {
    location: new URL('https://count.example/-/dashboard'),
    sessionStorage: { getItem: () => 'a key' },
    addEventListener() {},
    ResizeObserver: class { observe() {} },
    Option: class {},
    document: {
      hidden: false, getElementById: all, addEventListener() {}, createElement: element, createElementNS: element,
    },
    fetch: async (url) => (url.endsWith('/-/dashboard/data') ? answers.shift() : new Response('', { status: 404 })),
  });
  mock.timers.enable({ apis: ['setInterval'] });
  await import(`../public/dashboard.js?${made++}`);
  return all;
}

const board = (at, delivered) =>
  Response.json({
    at, region: 'eu', state: { level: 'good', text: 'all is well' }, site: { count: 1 }, pages: [], regions: [],
    events: [],
    processes: [{ name: 'a', since: 1, roles: [], load: { headcount_deliveries_total: delivered } }],
  });

afterEach(() => mock.timers.reset());

test('rates are not negative when another process answers, whose clock is behind', async () => {
  const all = await dashboard([board(10_000, 100), board(12_000, 120), board(11_000, 130), board(13_000, 140)]);
  const seen = [];
  for (let i = 0; i < 4; i++) {
    await settle();
    seen.push(all('deliveries').textContent);
    mock.timers.tick(1_000);
  }
  assert.deepEqual(seen, ['–', '10', '–', '5']);
});

test('a dashboard is not live while a proxy answers with its log-in page', async () => {
  const logIn = () => new Response('<!doctype html><title>Log in</title>');
  const all = await dashboard([board(10_000, 100), logIn(), board(12_000, 120)]);
  const seen = [];
  for (let i = 0; i < 3; i++) {
    await settle();
    seen.push(all('state').textContent);
    mock.timers.tick(1_000);
  }
  assert.deepEqual(seen, ['live', 'a proxy may want a log-in', 'live']);
});
