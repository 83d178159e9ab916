//! `jiffy disk`

use super::Context;
use crate::args::disk::{Disk, HotPlug, Serve};
use crate::client::encoded;
use crate::failure::{Failure, Outcome, Result};
use jiffy_wire::api;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// `jiffy disk`
///
/// # Errors
///
/// If there is no node, it refuses, or the disk server can't be started.
pub async fn disk(context: &Context, disk: Disk) -> Result<Outcome> {
    match disk {
        Disk::Serve(serve) => exec_server(context, serve).await,
        Disk::Attach(hot_plug) => {
            let client = context.client()?;
            client.post::<()>(&path(&hot_plug)).await?;
            Ok(Outcome::Done)
        }
        Disk::Detach(hot_plug) => {
            context.client()?.delete(&path(&hot_plug)).await?;
            Ok(Outcome::Done)
        }
    }
}

fn path(hot_plug: &HotPlug) -> String {
    let (vm, volume) = (encoded(&hot_plug.vm), encoded(&hot_plug.volume));
    format!("/v1/vms/{vm}/disks/{volume}")
}

/// Replaces this process by the server (execve), which gets its signals and sets the exit
/// status.
async fn exec_server(context: &Context, serve: Serve) -> Result<Outcome> {
    let program = context.folders.program("jiffy-disk")?;
    let is_path = serve.what.as_os_str().as_encoded_bytes().contains(&b'/');
    let file = match is_path && serve.what.exists() {
        true => serve.what.clone(),
        false => file_of_image(context, &serve).await?,
    };
    let mut command = Command::new(program);
    command
        .arg("serve")
        .arg(file)
        .arg("--socket")
        .arg(&serve.vhost_user);
    if serve.writable {
        command.arg("--writable");
    }
    // It returns only if it fails.
    Err(Failure::io(
        "the disk server can't be started",
        command.exec(),
    ))
}

async fn file_of_image(context: &Context, serve: &Serve) -> Result<PathBuf> {
    let shown = serve.what.display();
    let name = serve
        .what
        .to_str()
        .ok_or_else(|| Failure::new(format!("{shown} does not exist")))?;
    if serve.writable {
        return Err(
            Failure::new(format!("the image {shown} is read-only: VMs share it"))
                .hint("serve a copy of it by its path"),
        );
    }
    let found = context.node()?;
    if found.in_machine {
        return Err(Failure::new(format!(
            "images of the machine can't be served on this host, and there is no file {shown} here"
        ))
        .hint("give the path of a file; it must contain a slash"));
    }
    let path = format!("/v1/images/{}", encoded(name));
    let image: api::Image = found.client.get(&path).await?;
    if image.present < image.size {
        return Err(Failure::new(format!(
            "only {} of {} bytes of the image {shown} are stored here",
            image.present, image.size
        ))
        .hint("a snapshot of a VM that was started from it fetches the rest"));
    }
    image.file.ok_or_else(|| {
        Failure::new(format!(
            "the node does not report the path of the image {shown}"
        ))
    })
}
