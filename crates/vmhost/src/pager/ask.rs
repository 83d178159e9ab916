//! Requests to the pager, and its answers.

use super::{ANSWER_TIME, DISK_TIME, Pager, links};
use crate::dial::dial;
use crate::text::short;
use jiffy_content::model::image::LazyDisk;
use jiffy_content::model::vm::Paged;
use jiffy_jail::access::open_socket;
use jiffy_wire::lines;
use jiffy_wire::pager::{PagerRequest, PagerResponse};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Longest line from a pager.
const MAX_ANSWER: u64 = 64 * 1024;

/// The process id of the pager that answered.
type PagerPid = std::result::Result<Option<u32>, String>;

impl Pager {
    pub(super) async fn send_serve(&self, id: &str, paged: &Paged) -> PagerPid {
        let socket = self.paths.pager_vm_socket(id);
        let _ = fs::remove_file(&socket);
        let origins = jiffy_content::snapshots::remote::origins(&paged.image, &self.paths);
        if !origins.is_empty() {
            let image = paged.image.clone();
            let request = PagerRequest::Origins { image, origins };
            done(self.ask(&request, ANSWER_TIME).await)?;
        }
        let request = PagerRequest::Serve {
            name: id.to_owned(),
            socket: socket.clone(),
            image: paged.image.clone(),
            record: paged.record.clone(),
            prefetch: paged.prefetch,
        };
        let told = self.send(&request).await?;
        let folder = self.paths.vm_run(id);
        open_to_vmms(&socket, &folder)?;
        if folder.exists() {
            let linked = links::link_memory(&self.paths, id);
            linked.map_err(|error| format!("its socket can't be linked: {error}"))?;
        }
        Ok(told)
    }

    pub(super) async fn send_open_disk(&self, disk: &LazyDisk) -> PagerPid {
        let mut requests = disk.requests(&self.paths);
        let Some(open) = requests.pop() else {
            return Ok(None);
        };
        for request in requests {
            done(self.ask(&request, DISK_TIME).await)?;
        }
        let told = self.send(&open).await?;
        let socket = self.paths.disk_socket(&disk.name());
        open_to_vmms(&socket, &self.paths.run.join("pager"))?;
        links::relink_all(&self.paths, disk);
        Ok(told)
    }

    async fn send(&self, request: &PagerRequest) -> PagerPid {
        match self.ask_with_pid(request, DISK_TIME).await {
            Ok((answer, pid)) => done(Ok(answer)).map(|()| pid),
            Err(error) => done(Err(error)).map(|()| None),
        }
    }

    pub(super) async fn ask(
        &self,
        request: &PagerRequest,
        within: Duration,
    ) -> io::Result<PagerResponse> {
        let (answer, _) = self.ask_with_pid(request, within).await?;
        Ok(answer)
    }

    pub(super) async fn ask_with_pid(
        &self,
        request: &PagerRequest,
        within: Duration,
    ) -> io::Result<(PagerResponse, Option<u32>)> {
        let asked = async {
            let stream = dial(&self.paths.pager_socket()).await?;
            let pid = stream.peer_cred()?.pid();
            let answer = exchange(stream, request).await?;
            Ok((answer, pid.and_then(|pid| u32::try_from(pid).ok())))
        };
        timeout(within, asked)
            .await
            .unwrap_or(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Lets VMMs that may enter `folder` connect to a socket of the pager. A VM without a folder yet
/// gets access to the socket when its folder is made.
fn open_to_vmms(socket: &Path, folder: &Path) -> std::result::Result<(), String> {
    if !folder.exists() {
        return Ok(());
    }
    open_socket(socket, folder)
        .map_err(|error| format!("its socket can't be opened to VMMs: {error}"))
}

pub(crate) async fn exchange(
    mut stream: UnixStream,
    request: &PagerRequest,
) -> io::Result<PagerResponse> {
    let line = lines::encode(request)?;
    stream.write_all(&line).await?;
    let mut answer = Vec::new();
    BufReader::new(stream.take(MAX_ANSWER))
        .read_until(b'\n', &mut answer)
        .await?;
    Ok(serde_json::from_slice(&answer)?)
}

pub(super) fn done(answer: io::Result<PagerResponse>) -> std::result::Result<(), String> {
    match answer {
        Ok(PagerResponse::Ok) => Ok(()),
        Ok(PagerResponse::Error(why)) => Err(short(why.trim_end_matches('.'))),
        Ok(other) => Err(format!("it gave the unexpected answer {other:?}")),
        Err(error) => Err(format!("it does not answer: {error}")),
    }
}
