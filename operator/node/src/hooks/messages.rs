//! The messages and the service of `proto/kubevirt_plugins_v1alpha1.proto`, as tonic's generator would write them. By
//! hand, because there are three, and a build needs no compiler of protobuf then.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::server::{Grpc, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// Path of the one call of the service.
pub const EXECUTE_NODE_HOOK: &str = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook";

/// The node on which virt-handler runs.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct NodeContext {
    /// Name of the node.
    #[prost(string, tag = "1")]
    pub node_name: String,
}

/// One call of a hook.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ExecuteNodeHookRequest {
    /// Hook point, like `PreVMStart`.
    #[prost(string, tag = "1")]
    pub hook_point: String,
    /// The VMI in JSON.
    #[prost(bytes = "vec", tag = "2")]
    pub vmi: Vec<u8>,
    /// The node on which virt-handler runs.
    #[prost(message, optional, tag = "3")]
    pub node_context: Option<NodeContext>,
}

/// The answer without an error.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct ExecuteNodeHookResponse {}

type Answer<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

/// Carries out calls of hooks.
pub trait NodeHooks: Send + Sync + 'static {
    /// Carries out one call.
    fn execute(
        self: Arc<Self>,
        request: Request<ExecuteNodeHookRequest>,
    ) -> Answer<Response<ExecuteNodeHookResponse>, Status>;
}

/// The service over a [`NodeHooks`].
pub struct NodeHookService<T>(Arc<T>);

impl<T> NodeHookService<T> {
    /// Serves `hooks`.
    pub fn new(hooks: Arc<T>) -> NodeHookService<T> {
        NodeHookService(hooks)
    }
}

impl<T> Clone for NodeHookService<T> {
    fn clone(&self) -> NodeHookService<T> {
        NodeHookService(Arc::clone(&self.0))
    }
}

struct Execute<T>(Arc<T>);

impl<T: NodeHooks> UnaryService<ExecuteNodeHookRequest> for Execute<T> {
    type Response = ExecuteNodeHookResponse;
    type Future = Answer<Response<ExecuteNodeHookResponse>, Status>;

    fn call(&mut self, request: Request<ExecuteNodeHookRequest>) -> Self::Future {
        Arc::clone(&self.0).execute(request)
    }
}

/// Upper bound on a request, in bytes: etcd stores objects of at most 1.5 MiB.
const REQUEST_BYTES_MAX: usize = 4 << 20;

impl<T: NodeHooks> tower_service::Service<http::Request<Body>> for NodeHookService<T> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let hooks = Arc::clone(&self.0);
        Box::pin(async move {
            if request.uri().path() != EXECUTE_NODE_HOOK {
                return Ok(Status::unimplemented("this plugin serves node hooks only").into_http());
            }
            let mut grpc = Grpc::new(ProstCodec::default()).max_decoding_message_size(REQUEST_BYTES_MAX);
            Ok(grpc.unary(Execute(hooks), request).await)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    const PROTO: &str = include_str!("../../proto/kubevirt_plugins_v1alpha1.proto");

    /// Fields of a message in the file: type, name and number.
    fn fields(message: &str) -> Vec<(String, String, u32)> {
        let (_, rest) = PROTO.split_once(&format!("message {message} {{")).expect("it is in the file");
        let (body, _) = rest.split_once('}').expect("it ends");
        let fields = body.lines().filter_map(|line| line.trim().strip_suffix(';'));
        let field = |line: &str| {
            let (name, number) = line.split_once(" = ").expect("a field");
            let (kind, name) = name.split_once(' ').expect("a type");
            (kind.to_owned(), name.to_owned(), number.parse().expect("a number"))
        };
        fields.map(field).collect()
    }

    fn field(kind: &str, name: &str, number: u32) -> (String, String, u32) {
        (kind.into(), name.into(), number)
    }

    #[test]
    fn the_messages_are_those_of_the_file() {
        assert_eq!(fields("NodeContext"), [field("string", "node_name", 1)]);
        let request =
            [field("string", "hookPoint", 1), field("bytes", "vmi", 2), field("NodeContext", "node_context", 3)];
        assert_eq!(fields("ExecuteNodeHookRequest"), request);
        assert!(PROTO.contains("message ExecuteNodeHookResponse {}"));
        let package = PROTO.lines().find_map(|line| line.strip_prefix("package ")?.strip_suffix(';'));
        let service = PROTO.lines().find_map(|line| line.strip_prefix("service ")?.strip_suffix(" {"));
        let path = format!("/{}.{}/ExecuteNodeHook", package.expect("a package"), service.expect("a service"));
        assert_eq!(path, EXECUTE_NODE_HOOK);
    }

    #[test]
    fn a_request_has_the_bytes_of_the_wire_format() {
        let context = NodeContext { node_name: "n".into() };
        let request = ExecuteNodeHookRequest {
            hook_point: "PreVMStart".into(),
            vmi: b"{}".to_vec(),
            node_context: Some(context),
        };
        let bytes = b"\x0a\x0aPreVMStart\x12\x02{}\x1a\x03\x0a\x01n";
        assert_eq!(request.encode_to_vec(), bytes);
        assert_eq!(ExecuteNodeHookRequest::decode(&bytes[..]), Ok(request));
        assert_eq!(ExecuteNodeHookResponse {}.encode_to_vec(), b"");
    }
}
