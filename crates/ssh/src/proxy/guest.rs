//! Copies `jiffy-ssh-guest` into the VM and starts it there.

use jiffy_cli::WaitTime;
use jiffy_cli::client::{Client, Upgraded, encoded, vm_path};
use jiffy_cli::failure::{Failure, Result, reason};
use jiffy_wire::agent::{
    Command, CopyDone, CopyEntry, CopyFrame, CopyKind, ExecOutput, ExitStatus, StartFailure,
};
use jiffy_wire::api::Vm;
use jiffy_wire::frame::MAX_DATA;
use std::path::Path;

/// Folder of `jiffy-ssh-guest` in the VM: in memory, and writable for root only.
const FOLDER: &str = "/run";

/// A VM that has `jiffy-ssh-guest`.
pub struct Guest {
    client: Client,
    vm: Vm,
    /// Path of `jiffy-ssh-guest` in the VM.
    program: String,
    time: WaitTime,
}

/// Result of an attempt to start `jiffy-ssh-guest`.
enum Started {
    Yes,
    NotThere,
}

impl Guest {
    /// Wakes the VM if it is hibernated, and copies `program` into it if it is missing there.
    ///
    /// # Errors
    ///
    /// If `program` can't be read, the VM can't be used, or the program can't be copied or does not
    /// run there.
    pub async fn prepare(client: Client, vm: Vm, program: &Path, time: WaitTime) -> Result<Guest> {
        let contents = std::fs::read(program).map_err(|error| {
            Failure::new(format!(
                "{} can't be read: {}",
                program.display(),
                reason(&error)
            ))
        })?;
        // The name contains a hash, because another release of jiffy copies another program.
        let hash = blake3::hash(&contents).to_hex();
        let guest = Guest {
            client,
            vm,
            program: format!("{FOLDER}/jiffy-ssh-{}", &hash[..16]),
            time,
        };
        if let Started::NotThere = guest.check().await? {
            guest.copy(contents).await?;
            if let Started::NotThere = guest.check().await? {
                return Err(Failure::new(format!(
                    "{} does not exist in {} after it was copied there",
                    guest.program, guest.vm.name
                )));
            }
        }
        Ok(guest)
    }

    /// A command that runs `jiffy-ssh-guest` with these arguments as a user.
    pub fn command(&self, user: &str, arguments: &[&str]) -> Command {
        let mut argv = vec![self.program.clone()];
        argv.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        Command {
            argv,
            cwd: Some("/".into()),
            user: Some(user.to_owned()),
            stdin: true,
            ..Command::default()
        }
    }

    /// Starts a command in the VM.
    ///
    /// # Errors
    ///
    /// If the node can't be reached, or refuses the request.
    pub async fn exec(&self, command: &Command) -> Result<Upgraded> {
        let path = vm_path(&self.vm.id, &format!("/exec{}", self.time.query()));
        self.client.upgrade(&path, Some(command)).await
    }

    async fn check(&self) -> Result<Started> {
        let Upgraded { mut frames, .. } = self.exec(&self.command("0", &["check"])).await?;
        let mut said = Vec::new();
        loop {
            let why = match frames.reader.next::<ExecOutput>().await? {
                Some(ExecOutput::Started { .. }) => continue,
                Some(ExecOutput::Output { data, .. }) => {
                    said.truncate(1024);
                    said.extend(data);
                    continue;
                }
                Some(ExecOutput::Exited(ExitStatus::Code(0))) => return Ok(Started::Yes),
                Some(ExecOutput::Failed(error)) if error.kind == StartFailure::NotFound => {
                    return Ok(Started::NotThere);
                }
                Some(ExecOutput::Failed(error)) => error.message,
                Some(ExecOutput::Lost { message, .. }) => message,
                Some(ExecOutput::Exited(_)) => String::from_utf8_lossy(&said).into_owned(),
                None => "the connection was lost".to_owned(),
            };
            return Err(Failure::new(format!(
                "jiffy-ssh-guest can't run in {}: {why}",
                self.vm.name
            )));
        }
    }

    async fn copy(&self, contents: Vec<u8>) -> Result<()> {
        let order = format!("/copy-in?path={}", encoded(&self.program));
        let path = vm_path(&self.vm.id, &self.time.after(&order));
        let Upgraded { mut frames, .. } = self.client.upgrade::<()>(&path, None).await?;
        let entry = CopyEntry {
            path: String::new(),
            kind: CopyKind::File(contents.len() as u64),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime: 0,
        };
        frames.writer.send(&CopyFrame::Entry(entry)).await?;
        for piece in contents.chunks(MAX_DATA) {
            frames.writer.send(&CopyFrame::Data(piece.to_vec())).await?;
        }
        frames.writer.send(&CopyFrame::End).await?;
        let why = match frames.reader.next::<CopyDone>().await? {
            Some(CopyDone { error: None, .. }) => return Ok(()),
            Some(CopyDone {
                error: Some(error), ..
            }) => error,
            None => "the connection was lost".to_owned(),
        };
        Err(Failure::new(format!(
            "jiffy-ssh-guest can't be copied into {}: {why}",
            self.vm.name
        )))
    }
}
