//! SFTP, version 3, with the extensions of OpenSSH that its clients use.
//!
//! Every operation is a system call with the rights of the session's user, which the kernel checks.
//! No library is used: it would need an event loop, which takes memory of the VM, and file names in
//! UTF-8.
//!
//! * [`packet`]: fields of requests and answers.
//! * [`files`]: the requests; [`listing`]: a file as a line of text.
//!
//! Source: draft-ietf-secsh-filexfer-02, and PROTOCOL of OpenSSH 9.2.

mod files;
mod listing;
mod packet;

use files::Files;
use packet::{Answer, Fields, MAX_REQUEST, VERSION, kind};
use std::io::{self, BufReader, ErrorKind, Read, Write};

/// Serves a client until it closes its end.
///
/// # Errors
///
/// If `input` or `output` fails, a request is cut short, or its length is 0 or too large.
pub fn serve(input: impl Read, mut output: impl Write) -> io::Result<()> {
    let mut input = BufReader::with_capacity(64 * 1024, input);
    let mut files = Files::default();
    let mut request = Vec::new();
    while read_request(&mut input, &mut request)? {
        if let Some(answer) = answer(&mut files, &request) {
            output.write_all(&answer.into_bytes())?;
        }
    }
    Ok(())
}

/// Reads a request without its length; false at the end.
fn read_request(input: &mut impl Read, request: &mut Vec<u8>) -> io::Result<bool> {
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(false),
        read => read?,
    }
    let length = u32::from_be_bytes(length) as usize;
    if length == 0 || length > MAX_REQUEST {
        return Err(io::Error::other("a request has no valid length"));
    }
    request.resize(length, 0);
    input.read_exact(request)?;
    Ok(true)
}

/// The answer to a request; `None` if it has no id to answer to.
fn answer(files: &mut Files, request: &[u8]) -> Option<Answer> {
    let mut fields = Fields::new(request);
    let kind = fields.byte()?;
    if kind == kind::INIT {
        let mut answer = Answer::new(kind::VERSION);
        answer.number(VERSION);
        for (name, version) in files::EXTENSIONS {
            answer.text(name);
            answer.text(version);
        }
        return Some(answer);
    }
    let id = fields.number()?;
    Some(match files.perform(kind, id, &mut fields) {
        Ok(answer) => answer,
        Err(error) => error.answer(id),
    })
}

#[cfg(test)]
mod tests;
