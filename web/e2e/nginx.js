// A real nginx between browser and server, for the browser tests.
import { spawn } from 'node:child_process';
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir, userInfo } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

import { TIMEOUT } from './browser.js';
import { freePort } from './server.js';

/** Some distributions keep it where the PATH of a user does not look. */
const PATH = `${process.env.PATH}:/usr/sbin:/usr/local/sbin`;

/** What deploy/nginx.conf has for each location. */
export const RIGHT = { upgrade: true, host: '$http_host' };

/**
 * Starts an nginx that has a port for each way of passing requests on to a server.
 * @param {number | number[]} port of the server, or of several: one that is away or drains is passed over
 * @param {Record<string, {upgrade?: boolean, host?: string}>} ways upgrade: WebSockets pass; host: what the header
 *   Host is set to; nginx's own default is the wrong one
 */
export async function startNginx(port, ways) {
  const folder = await mkdtemp(join(tmpdir(), 'headcount-nginx-'));
  await mkdir(join(folder, 'logs'));
  const urls = {};
  const servers = [];
  for (const [name, { upgrade, host }] of Object.entries(ways)) {
    const own = await freePort();
    urls[name] = `http://127.0.0.1:${own}`;
    servers.push(`server {
      listen 127.0.0.1:${own};
      location / {
        proxy_pass http://servers;
        proxy_next_upstream error timeout http_503;
        proxy_http_version 1.1;
        proxy_buffering off;
        ${host ? `proxy_set_header Host ${host};` : ''}
        ${upgrade ? 'proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $upgrading;' : "proxy_set_header Connection '';"}
      }
    }`);
  }
  const temporary = ['client_body', 'proxy', 'fastcgi', 'uwsgi', 'scgi']
    .map((kind) => `${kind}_temp_path ${folder}/${kind};`)
    .join('\n');
  await writeFile(
    join(folder, 'nginx.conf'),
    `${userInfo().uid === 0 ? 'user root;' : ''}
    daemon off; worker_processes 1; pid ${folder}/pid; error_log ${folder}/logs/error.log;
    events { worker_connections 256; }
    http {
      access_log off;
      ${temporary}
      upstream servers { ${[port].flat().map((port) => `server 127.0.0.1:${port} max_fails=0;`).join(' ')} }
      map $http_upgrade $upgrading { default upgrade; '' ''; }
      ${servers.join('\n')}
    }`,
  );
  const nginx = spawn('nginx', ['-p', folder, '-c', 'nginx.conf', '-e', `${folder}/logs/error.log`], {
    env: { ...process.env, PATH },
    stdio: ['ignore', 'ignore', 'pipe'],
  });
  let log = '';
  let failed;
  nginx.stderr.on('data', (data) => (log += data));
  nginx.on('error', (error) => (failed = error));
  const ended = new Promise((end) => nginx.on('close', end));
  const up = (url) =>
    new Promise((answer) => {
      const socket = connect(Number(new URL(url).port), '127.0.0.1', () => answer(true));
      socket.on('error', () => answer(false)).on('close', () => socket.destroy());
      socket.on('connect', () => socket.end());
    });
  for (const deadline = Date.now() + TIMEOUT; ; ) {
    if (failed) throw new Error(`nginx does not start (make setup installs it): ${failed.message}`);
    if (nginx.exitCode !== null || Date.now() > deadline) throw new Error(`nginx does not serve: ${log}`);
    if (await up(Object.values(urls).at(-1))) break;
    await sleep(100);
  }
  return {
    urls,
    async close() {
      if (nginx.exitCode === null) nginx.kill('SIGTERM');
      await ended;
      await rm(folder, { recursive: true });
    },
  };
}

