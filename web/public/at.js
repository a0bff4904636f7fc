/** The address of something on this server, which is at the root of its host or below a path (--base-path). */
export const at = (path) => new URL(`../${path}`, import.meta.url).href;
