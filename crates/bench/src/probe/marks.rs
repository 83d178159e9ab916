//! Marks that a measuring guest writes to its serial port.

use super::{Running, command};
use crate::plan::{FAILURE, MARKER};
use anyhow::{Context, Result, bail};
use std::io::Read;
use std::process::{ChildStdout, Stdio};

/// Finds the guest's marks in its output.
pub struct Marks {
    output: ChildStdout,
    /// Marks that arrived together with an earlier one.
    early: usize,
}

impl Marks {
    /// Starts a VMM and returns its marks.
    ///
    /// # Errors
    ///
    /// If it can't be started.
    pub fn start(argv: &[String]) -> Result<(Running, Marks)> {
        let mut command = command(argv)?;
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Running(command.spawn().with_context(|| argv.join(" "))?);
        let marks = Marks::of(&mut child)?;
        Ok((child, marks))
    }

    /// The marks of a VMM whose output is piped.
    ///
    /// # Errors
    ///
    /// If its stdout is not piped.
    pub fn of(child: &mut Running) -> Result<Marks> {
        Ok(Marks {
            output: child.0.stdout.take().context("stdout is piped")?,
            early: 0,
        })
    }

    /// Waits for the next mark.
    ///
    /// # Errors
    ///
    /// If the VMM ends before it, or the guest reports a failure.
    pub fn next(&mut self, child: &mut Running) -> Result<()> {
        let mut bytes = [0; 256];
        while self.early == 0 {
            let got = self.output.read(&mut bytes)?;
            if got == 0 {
                let mut message = String::new();
                if let Some(stderr) = &mut child.0.stderr {
                    stderr.take(4096).read_to_string(&mut message)?;
                }
                bail!("it ended before its mark: {}", message.trim());
            }
            let bytes = &bytes[..got];
            if let Some(at) = bytes.iter().position(|byte| *byte == FAILURE) {
                let mut rest = bytes[at + 1..].to_vec();
                while !rest.contains(&b'\n') {
                    let mut byte = [0];
                    self.output.read_exact(&mut byte)?;
                    rest.push(byte[0]);
                }
                bail!("in the guest: {}", String::from_utf8_lossy(&rest).trim());
            }
            self.early = bytes.iter().filter(|byte| **byte == MARKER).count();
        }
        self.early -= 1;
        Ok(())
    }
}
