//! The OpenSSH client, scp, rsync and git against `jiffy-ssh`, with a stand-in for jiffyd in front
//! of the real agent, whose "guest" is this host.

#[path = "../../../guest/tests/harness/mod.rs"]
mod harness;

mod commands;
mod files;
mod forwarding;
mod keys;
mod node;
mod terminal;
