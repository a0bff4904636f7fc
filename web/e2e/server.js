// A real server process for the browser tests.
import { execFile, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { TIMEOUT } from './browser.js';

const ROOT = fileURLToPath(new URL('../..', import.meta.url));

/** The program under test: $HEADCOUNT_BIN, or built here. */
export async function program() {
  if (process.env.HEADCOUNT_BIN) return { path: process.env.HEADCOUNT_BIN, remove: async () => {} };
  const folder = await mkdtemp(join(tmpdir(), 'headcount-web-'));
  const path = join(folder, 'headcount');
  const remove = () => rm(folder, { recursive: true });
  try {
    await promisify(execFile)('go', ['build', '-o', path, './cmd/headcount'], { cwd: ROOT });
  } catch (error) {
    await remove();
    throw error;
  }
  return { path, remove };
}

// The range is that of internal/servertest/ports.go. The system takes none of these ports for outgoing connections:
// else a client of a server that is away may get its port, or be connected to itself there.
const FIRST_PORT = 12_000;
const END_PORT = 32_000;

/** Resolves to a server that listens there, or to undefined. */
const listening = (where) =>
  new Promise((resolve) => {
    const server = createServer().on('error', () => resolve()).listen(where, () => resolve(server));
  });

/** A port that stays free for a server, also while the server is away. Other test files do not take it meanwhile. */
export async function freePort() {
  for (;;) {
    const port = FIRST_PORT + Math.floor(Math.random() * (END_PORT - FIRST_PORT));
    if (process.platform === 'linux') {
      const claim = await listening({ path: `\0headcount-test-port-${port}` }); // until this process ends
      if (!claim) continue;
      claim.unref();
    }
    const server = await listening({ port, host: '127.0.0.1' });
    if (!server) continue;
    server.close();
    await once(server, 'close');
    return port;
  }
}

/** A server that can be stopped and started again at the same address. */
export class Server {
  #path;
  #flags;
  #admin;
  #process;
  #log = '';

  /** flags may be a function of the port. */
  static async start(path, flags = []) {
    const server = new Server();
    server.#path = path;
    server.port = await freePort();
    server.#flags = typeof flags === 'function' ? flags(server.port) : flags;
    server.#admin = await freePort();
    server.url = `http://127.0.0.1:${server.port}`;
    await server.run();
    return server;
  }

  async run() {
    const flags = ['--listen', `127.0.0.1:${this.port}`, '--admin-listen', `127.0.0.1:${this.#admin}`];
    const env = { ...process.env, GORACE: 'atexit_sleep_ms=0' }; // the race detector would add a second to each end
    this.#process = spawn(this.#path, ['serve', ...flags, ...this.#flags], { env, stdio: ['ignore', 'pipe', 'pipe'] });
    for (const stream of [this.#process.stdout, this.#process.stderr]) {
      stream.on('data', (data) => (this.#log = (this.#log + data).slice(-20_000)));
    }
    for (const deadline = Date.now() + TIMEOUT; Date.now() < deadline; ) {
      if (this.#process.exitCode !== null) throw new Error(`the server ended at once:\n${this.#log}`);
      const answer = await fetch(`http://127.0.0.1:${this.#admin}/readyz`).catch(() => undefined);
      if (answer?.status === 200) return;
      await sleep(100);
    }
    throw new Error(`the server did not become ready:\n${this.#log}`);
  }

  /** Ends the process with SIGTERM, and fails unless it ends well. */
  async stop() {
    await this.end('SIGTERM');
    if (this.#process.exitCode !== 0 || this.#log.includes('DATA RACE'))
      throw new Error(`the server ended with status ${this.#process.exitCode}:\n${this.#log}`);
  }

  /** Ends the process with a signal, however it ends then. */
  async end(signal) {
    const { exitCode, signalCode } = this.#process;
    if (exitCode !== null || signalCode !== null) return;
    this.#process.kill(signal);
    // A server that does not end is a fault. SIGQUIT makes it say what its goroutines do.
    const overdue = setTimeout(() => this.#process.kill('SIGQUIT'), TIMEOUT / 2);
    await once(this.#process, 'close'); // that is with all it had to say
    clearTimeout(overdue);
  }

  /** A new anonymous viewer, for as long as a hold lasts. Returns a function that ends it sooner. */
  async hold(page) {
    const put = (action, headers = {}) =>
      fetch(`${this.url}/${encodeURIComponent(page)}/counter`, {
        method: 'PUT',
        headers: { 'Content-Type': 'application/json', ...headers },
        body: JSON.stringify({ action }),
      });
    const answer = await put('increment');
    if (!answer.ok) throw new Error(`a hold is answered ${answer.status}: ${await answer.text()}`);
    const [cookie] = answer.headers.get('Set-Cookie').split(';');
    return () => put('decrement', { Cookie: cookie });
  }

  /** How many connections the server has. */
  async connections() {
    const answer = await fetch(`http://127.0.0.1:${this.#admin}/metrics`);
    return Number(/^headcount_connections (\d+)$/m.exec(await answer.text())[1]);
  }

  async count(page) {
    const answer = await fetch(`${this.url}/${encodeURIComponent(page)}/counter`);
    return (await answer.json()).count;
  }
}
