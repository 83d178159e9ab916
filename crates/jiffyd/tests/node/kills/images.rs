//! Kills during import and pull.

use super::{OPTIONS, ask, is_done, killed_at_every_call};
use crate::daemon::{Daemon, tar_of};
use crate::images::{by_name, encoded};
use crate::pulls::kept;
use crate::registry::Registry;
use jiffy_wire::api::Image;
use serde_json::json;

fn image(daemon: &Daemon, name: &str) -> Option<Image> {
    let all: Vec<Image> = daemon.get("/v1/images").json();
    all.into_iter().find(|image| image.name == name)
}

#[test]
fn an_image_is_complete_or_absent() {
    let mut daemon = Daemon::with(&OPTIONS);
    let tar = tar_of(&[("one", &[1; 100_000]), ("two", &[2; 100_000])]);
    let good: Image = daemon.post("/v1/images/mine?kind=root", &tar).json();
    assert_eq!(daemon.delete("/v1/images/mine").status, 204);
    killed_at_every_call(
        &mut daemon,
        |daemon| is_done(daemon, "POST", "/v1/images/mine?kind=root", &tar),
        |daemon, done| {
            let made = image(daemon, "mine");
            assert!(made.is_some() || !done);
            if let Some(made) = made {
                assert_eq!((&made.digest, made.size), (&good.digest, good.size));
                assert_eq!(daemon.delete("/v1/images/mine").status, 204);
            }
        },
    );
}

#[test]
fn a_pull_is_complete_or_can_be_resumed() {
    let registry = Registry::start();
    registry.put("web:1", &[("file", &[7; 50_000])], json!({}));
    let name = registry.name("web:1");
    let body = serde_json::to_vec(&by_name(&name)).unwrap();
    let mut daemon = Daemon::with(&OPTIONS);
    let before = kept(&daemon);
    let pull = |daemon: &Daemon| {
        let answer = ask(daemon, "POST", "/v1/pulls", &body)?;
        let said = String::from_utf8_lossy(&answer.body);
        Ok(answer.status == 200 && said.contains("pulled"))
    };
    killed_at_every_call(&mut daemon, pull, |daemon, done| {
        assert!(image(daemon, &name).is_some() || !done);
        assert!(pull(daemon).unwrap() && image(daemon, &name).is_some());
        let path = format!("/v1/images/{}", encoded(&name));
        assert_eq!(daemon.delete(&path).status, 204);
        assert_eq!(kept(daemon), before);
    });
}
