// Clients that generators make of the server's own /-/openapi.json, with their default settings, compile and work.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { cp, mkdir, mkdtemp, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

import { TIMEOUT } from './browser.js';
import { Server, program } from './server.js';

const run = promisify(execFile);
const WEB = fileURLToPath(new URL('..', import.meta.url));
const KEY = 'of the generated clients';

let folder; // of the clients
let binary;
let server;

before(
  async () => {
    folder = await mkdtemp(join(tmpdir(), 'headcount-openapi-'));
    await cp(join(WEB, 'e2e/openapi'), folder, { recursive: true });
    await symlink(join(WEB, 'node_modules'), join(folder, 'node_modules'));
    await writeFile(join(folder, 'package.json'), '{"type":"module"}');
    binary = await program();
    server = await Server.start(binary.path, [
      '--api-key',
      KEY,
      '--base-path',
      '/live',
      '--presence-timeout',
      '1m',
      '--shutdown-timeout',
      '2s',
    ]);
    const document = await (await fetch(`${server.url}/live/-/openapi.json`)).text();
    await writeFile(join(folder, 'openapi.json'), document);
    server.address = server.url + JSON.parse(document).servers[0].url; // as generators put it together
  },
  { timeout: 600_000 },
);

after(async () => {
  try {
    await server?.stop();
  } finally {
    await binary?.remove();
    if (folder) await rm(folder, { recursive: true });
  }
}, { timeout: TIMEOUT });

/** Runs a program in the folder, and returns what it says; what it says when it fails is the error. */
const say = async (name, ...args) => {
  const { stdout } = await run(name, args, { cwd: folder, maxBuffer: 1e8, env: { ...process.env, GOFLAGS: '' } }).catch(
    ({ stdout, stderr }) => assert.fail(`${name} ${args.join(' ')}: ${stdout}${stderr}`),
  );
  return stdout;
};

test('the client of oapi-codegen', async () => {
  const made = await say('go', 'tool', 'oapi-codegen', '-package', 'api', 'openapi.json');
  await mkdir(join(folder, 'api'));
  await writeFile(join(folder, 'api/api.go'), made);
  assert.match(await say('go', 'run', '.', server.address, KEY), /^[12] 3 3 true 400$/m);
});

test('the client of openapi-typescript', async () => {
  const bin = (path, ...args) => say(process.execPath, join(WEB, 'node_modules', path), ...args);
  await bin('openapi-typescript/bin/cli.js', 'openapi.json', '--output', 'schema.d.ts');
  const compilerOptions = {
    target: 'es2022',
    module: 'nodenext',
    strict: true,
    noUncheckedIndexedAccess: true,
    lib: ['es2023', 'dom', 'dom.iterable'],
    types: [],
    skipLibCheck: true,
    outDir: 'made',
  };
  await writeFile(join(folder, 'process.d.ts'), 'declare const process: { argv: string[] };\n');
  await writeFile(
    join(folder, 'tsconfig.json'),
    JSON.stringify({ compilerOptions, files: ['main.ts', 'process.d.ts'] }),
  );
  await bin('typescript/bin/tsc', '-p', '.');
  assert.match(await say(process.execPath, 'made/main.js', server.address, KEY), /^[12] 4 4 400 200$/m);
});
