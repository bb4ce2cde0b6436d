//! Units whose size the array changes.

use lunbd::ErrorKind;
use lunbd::engine::ResizeRequest;
use lunbd::error::Stage;

use super::machine::{Machine, attach, device_dir, shown_size, soon, unit, write_attribute};

pub(crate) fn a_unit_that_grew_is_seen_at_its_new_size_once_it_is_resized<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    let bytes = machine.grow();
    assert_ne!(bytes, attachment.size);
    // The kernel does not read the size by itself.
    assert_eq!(shown_size(&engine, &attachment.node), attachment.size);
    let request = ResizeRequest::new(source).at_least(bytes);
    let resized = engine.resize(&request, soon()).unwrap();
    assert!(resized.changed);
    assert_eq!((resized.old_size, resized.size), (attachment.size, bytes));
    assert_eq!(resized.node, attachment.node);
    assert_eq!(shown_size(&engine, &attachment.node), bytes);
    let again = engine.resize(&request, soon()).unwrap();
    assert!(!again.changed);
    assert_eq!((again.old_size, again.size), (bytes, bytes));
}

pub(crate) fn a_resize_beyond_the_units_size_is_not_ready<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    let request = ResizeRequest::new(source).at_least(attachment.size + 1);
    let error = engine.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    assert_eq!(error.stage(), Some(Stage::Rescan), "{error}");
    assert_eq!(shown_size(&engine, &attachment.node), attachment.size);
}

pub(crate) fn a_resize_names_an_offline_path_and_does_not_resize_it<M: Machine>() {
    let machine = M::with(1, 2);
    let (engine, source) = (machine.engine(), unit(machine.hosts()[0], 1));
    let attachment = attach(&engine, &source);
    machine.settle();
    let bytes = machine.grow();
    let state = device_dir(&engine, &source).join("state");
    write_attribute(&engine, &state, "offline\n");
    let request = ResizeRequest::new(source);
    let error = engine.resize(&request, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotReady, "{error}");
    let address = attachment.hctl().unwrap().to_string();
    let message = format!("{error:#}");
    assert!(
        message.contains(&address) && message.contains("offline"),
        "{message}"
    );
    assert_eq!(shown_size(&engine, &attachment.node), attachment.size);
    write_attribute(&engine, &state, "running\n");
    assert_eq!(engine.resize(&request, soon()).unwrap().size, bytes);
}
