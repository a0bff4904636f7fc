// A restart is nobody's departure: fifty people with the client that browsers run keep
// being counted, or are told that the count may be wrong, and all are back soon.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

import { TIMEOUT } from './browser.js';
import { RIGHT, startNginx } from './nginx.js';
import { Server, freePort, program } from './server.js';

const PEOPLE = 50;
const ROUNDS = Number(process.env.ROUNDS ?? 2); // of each kind; ROUNDS=20 takes ten minutes
const BACK_MS = 10_000; // invariant 1
const STALE_MS = 3000; // for so long a server that was killed says that it may lack who came last

let binary;
before(async () => (binary = await program()), { timeout: 600_000 });
after(() => binary?.remove());

/** People on a page, and what they were told. */
class Crowd {
  told = [];
  #process;

  static async gather(page, server) {
    const crowd = new Crowd();
    const script = fileURLToPath(new URL('crowd.js', import.meta.url));
    crowd.#process = spawn(process.execPath, ['--experimental-websocket', script, page, server], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    createInterface({ input: crowd.#process.stdout }).on('line', (line) => crowd.told.push(JSON.parse(line)));
    await crowd.until('everybody is there', () => crowd.whole());
    return crowd;
  }

  newest(what) {
    return this.told.findLast((t) => what in t);
  }
  whole() {
    const count = this.newest('count');
    return this.newest('open')?.open === PEOPLE && count?.count === PEOPLE && !count.stale;
  }
  async until(what, is) {
    for (const end = Date.now() + TIMEOUT; !is(); await sleep(20))
      if (Date.now() > end) throw new Error(`not so: ${what}; the last told: ${JSON.stringify(this.told.slice(-20))}`);
  }
  async leave() {
    this.#process.kill();
    await once(this.#process, 'close');
  }
}

/** Notes how late this process wakes, which is what the machine loses until end(). */
function losses() {
  let last = Date.now();
  const noted = { ms: 0, end: () => clearInterval(timer) };
  const timer = setInterval(() => {
    noted.ms += Math.max(0, Date.now() - last - 20);
    last = Date.now();
  }, 20);
  return noted;
}

/** One restart of servers at once, all away for a time. */
async function restart(crowd, servers, signal, away) {
  const from = crowd.told.length;
  await Promise.all(servers.map((server) => server.end(signal)));
  await sleep(away); // how long the server is not there is what this is about
  const start = Date.now();
  await Promise.all(servers.map((server) => server.run()));
  const back = Date.now();
  const lost = losses();
  await crowd.until('all are back', () => crowd.whole());
  const took = Date.now() - back;
  const excused = back + STALE_MS + lost.ms; // until then the machine may have kept people from coming back in time
  await sleep(8000); // whoever is forgotten is forgotten by now: presence-timeout and a second
  const wrong = crowd.told.slice(from).filter((t) => t.at >= start && 'count' in t && !t.stale && t.count !== PEOPLE
    && !(t.at >= start + STALE_MS && t.at < excused));
  lost.end();
  const late = lost.ms;
  const words = `${signal}, ${away} ms away: all back ${took} ms after the server was ready, the machine lost ${late} ms`;
  assert.deepEqual(wrong, [], `told a wrong count that is not stale; ${words}`);
  assert.ok(crowd.whole(), words);
  assert.ok(took <= BACK_MS + late, words);
  return words;
}

/** ROUNDS restarts with each signal; victims are the servers that go in a round. */
async function restarts(t, crowd, victims) {
  for (const signal of ['SIGTERM', 'SIGKILL'])
    for (let i = 0; i < ROUNDS; i++)
      t.diagnostic(await restart(crowd, victims(i), signal, [1000, 4000, 0, 5500, 2500][i % 5]));
}

test('one server: neither an orderly restart nor a kill changes a count', async (t) => {
  const dir = await mkdtemp(join(tmpdir(), 'headcount-restart-'));
  const server = await Server.start(binary.path, ['--data-dir', dir, '--shutdown-timeout', '2s']);
  const crowd = await Crowd.gather('p', server.url);
  try {
    await restarts(t, crowd, () => [server]);
  } finally {
    await crowd.leave();
    await server.end('SIGKILL');
    await rm(dir, { recursive: true });
  }
});

test('a cluster: neither an orderly restart nor a kill of one process, then of both, changes a count', async (t) => {
  const dir = await mkdtemp(join(tmpdir(), 'headcount-restart-'));
  const port = await freePort();
  const redis = spawn('redis-server', ['--port', port, '--dir', dir, '--save', '', '--appendonly', 'no'], {
    stdio: 'ignore',
  });
  const servers = [];
  let proxy;
  let crowd;
  try {
    for (let i = 0; i < 2; i++)
      servers.push(
        await Server.start(binary.path, [
          '--redis',
          `redis://127.0.0.1:${port}`,
          '--cluster-secret',
          'a secret for tests alone',
          '--shutdown-timeout',
          '2s',
          '--cluster-listen',
          `127.0.0.1:${await freePort()}`,
        ]),
      );
    proxy = await startNginx(servers.map((server) => server.port), { right: RIGHT });
    crowd = await Crowd.gather('p', proxy.urls.right);
    await restarts(t, crowd, (i) => (i % 2 ? servers : [servers[i % 4 ? 1 : 0]]));
  } finally {
    await crowd?.leave();
    await proxy?.close();
    await Promise.all(servers.map((server) => server.end('SIGKILL')));
    redis.kill();
    await rm(dir, { recursive: true });
  }
});
