//! Servers for traffic between guest and host.

use crate::say;
use anyhow::Result;
use jiffy_bench::plan::MARKER;
use jiffy_bench::traffic::{self, ANSWER, ANSWER_PORT, GUEST, PREFIX, Server};
use jiffy_bench::{http, link};
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};

/// As PID 1: sets the link up, and writes the mark once it listens.
pub fn serve(port: &File) -> Result<()> {
    link::set_up(link::index_of("eth0")?, GUEST, PREFIX)?;
    let server = Server::listen()?;
    say(port, MARKER)?;
    server.serve()
}

/// As the first command of a VM: writes to stdout once it listens.
pub fn answer() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ANSWER_PORT))?;
    let mut stdout = std::io::stdout();
    stdout.write_all(&[ANSWER, b'\n'])?;
    stdout.flush()?;
    traffic::answer(&listener)
}

/// As the first command of a VM: a server of HTTP.
pub fn answer_in_http() -> Result<()> {
    http::serve(&TcpListener::bind((Ipv4Addr::UNSPECIFIED, http::PORT))?)
}
