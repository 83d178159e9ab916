//! The imports.

use crate::channel::Channel;
use jiffy_rootfs::{
    Choice, ImageConfig, ImportError, Imported, Layer, Limits, Progress, Scratch, Source,
    SourceKind, child_into, import_into,
};
use jiffy_sys::durable::is_full;
use jiffy_sys::{causes, handed};
use jiffy_wire::api::ImportKind;
use jiffy_wire::import::{
    Answer, Config, FIRST_FILE, FIRST_SCRATCH, FailureKind, IMAGE, Made, Request, SCRATCH,
    Source as Wanted,
};
use std::error::Error;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time between two reports of progress.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Performs the request and answers it; false if there is no image.
pub fn perform(channel: &Channel) -> bool {
    let request = match channel.request() {
        Ok(request) => request,
        Err(error) => {
            channel.fail(FailureKind::Process, causes::sentence(&error));
            return false;
        }
    };
    let files = match Files::take(&request) {
        Ok(files) => files,
        Err(error) => {
            let sentence = format!("the import process lacks its files: {error}");
            channel.fail(FailureKind::Process, sentence);
            return false;
        }
    };
    match make(request, files, channel) {
        Ok(made) => channel.send(&Answer::Made(made)),
        // The daemon is gone.
        Err(ImportError::Cancelled) => false,
        Err(error) => {
            channel.fail(kind(&error), causes::sentence(&error));
            false
        }
    }
}

/// The open files of the process.
struct Files {
    image: File,
    scratch: Vec<File>,
    sources: Vec<File>,
}

impl Files {
    fn take(request: &Request) -> io::Result<Files> {
        let count = request.source.files() as i32;
        Ok(Files {
            image: file(IMAGE)?,
            scratch: (0..SCRATCH as i32)
                .map(|number| file(FIRST_SCRATCH + number))
                .collect::<io::Result<_>>()?,
            sources: (0..count)
                .map(|number| file(FIRST_FILE + number))
                .collect::<io::Result<_>>()?,
        })
    }

    fn source(&mut self) -> Result<File, ImportError> {
        match self.sources.is_empty() {
            true => Err(io::Error::from(io::ErrorKind::NotFound).into()),
            false => Ok(self.sources.remove(0)),
        }
    }
}

fn file(number: i32) -> io::Result<File> {
    let name = Path::new("file");
    handed::add_inherited(name.to_owned(), number)?;
    let file = handed::take(name).ok_or(io::ErrorKind::NotFound)?;
    Ok(file.into())
}

fn make(request: Request, mut files: Files, channel: &Channel) -> Result<Made, ImportError> {
    let limits = Limits::default();
    let scratch = Scratch::files(&request.folder, std::mem::take(&mut files.scratch));
    let mut choice = Choice {
        scratch: scratch.clone(),
        ..Choice::new("")
    };
    let mut reports = Reports {
        channel,
        last: Instant::now(),
    };
    let mut watch = |progress| reports.report(progress);
    let source = match request.source {
        Wanted::Layers { config, layers } => {
            let layer = |layer: jiffy_wire::import::Layer| Layer {
                path: layer.name.into(),
                media_type: layer.media_type,
                size: Some(layer.size),
                // The daemon has checked it.
                digest: None,
                diff_id: None,
            };
            let layers: Vec<Layer> = layers.into_iter().map(layer).collect();
            Source::opened_layers(&config, &layers, files.sources, &choice)?
        }
        Wanted::Archive { reference, format } => {
            choice.reference = reference;
            choice.format = format.map(|format| match format {
                ImportKind::Root => SourceKind::RootTar,
                ImportKind::Layout => SourceKind::Oci,
                ImportKind::Docker => SourceKind::DockerArchive,
            });
            Source::stream(files.source()?, &choice)?
        }
        Wanted::Changes { parent, changes } => {
            // Whatever the guest's files are called.
            choice.format = Some(SourceKind::RootTar);
            let image = Arc::new(files.source()?);
            let changes = Source::opened(files.source()?, Path::new(&changes), &choice)?;
            let name = Path::new(&parent);
            let child = child_into(
                image,
                name,
                changes,
                &files.image,
                scratch,
                &limits,
                &mut watch,
            )?;
            return Ok(made(child.image, !child.rebuilt));
        }
    };
    import_into(source, &files.image, &scratch, &limits, &mut watch)
        .map(|imported| made(imported, false))
}

/// Reports progress to the daemon.
struct Reports<'a> {
    channel: &'a Channel,
    last: Instant,
}

impl Reports<'_> {
    fn report(&mut self, progress: Progress) -> ControlFlow<()> {
        let (Progress::Reading { done, total } | Progress::Writing { done, total }) = progress
        else {
            return ControlFlow::Continue(());
        };
        if self.last.elapsed() < REPORT_INTERVAL {
            return ControlFlow::Continue(());
        }
        self.last = Instant::now();
        match self.channel.send(&Answer::Progress { done, total }) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }
}

fn made(imported: Imported, shares: bool) -> Made {
    Made {
        entries: imported.entries,
        shares,
        config: config(imported.config),
    }
}

fn config(config: ImageConfig) -> Config {
    Config {
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        env: config.env,
        workdir: config.working_dir,
        user: config.user,
        stop_signal: config.stop_signal,
        exposed_ports: config
            .exposed_ports
            .iter()
            .map(|port| format!("{}/{}", port.port, port.protocol))
            .collect(),
        labels: config.labels.into_iter().collect(),
    }
}

fn kind(error: &(dyn Error + 'static)) -> FailureKind {
    match causes::find::<io::Error>(error).is_some_and(is_full) {
        true => FailureKind::Full,
        false => FailureKind::Source,
    }
}
