// Preloaded into the node process of NNI's manager (NODE_OPTIONS=--require), which listens on all
// network interfaces, knows no login, and has no setting for either: a server that names no host
// listens on the loopback address alone.
"use strict";
const net = require("net");
const listen = net.Server.prototype.listen;

net.Server.prototype.listen = function (port, ...rest) {
  const namesPortOnly = typeof port === "number" && typeof rest[0] !== "string";
  return listen.call(this, port, ...(namesPortOnly ? ["127.0.0.1"] : []), ...rest);
};
