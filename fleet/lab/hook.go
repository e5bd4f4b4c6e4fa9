package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// Names and numbers of KubeVirt's pkg/hooks/plugins/v1alpha1/api.proto (main, 2026): written out here, so that the
// server under test meets a client that shares no generated code with it.
const (
	hookMethod     = "/kubevirt.hooks.plugins.v1alpha1.NodeHookService/ExecuteNodeHook"
	hookPointField = protowire.Number(1)
	hookVMIField   = protowire.Number(2)
	hookNodeField  = protowire.Number(3)
	nodeNameField  = protowire.Number(1)
)

// hookTimeout is KubeVirt's default for a node hook.
const hookTimeout = 30 * time.Second

// bytesCodec passes messages that are encoded already.
type bytesCodec struct{}

func (bytesCodec) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }
func (bytesCodec) Name() string                        { return "proto" }
func (bytesCodec) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func encodeHookRequest(point string, vmi []byte, node string) []byte {
	message := protowire.AppendString(protowire.AppendTag(nil, hookPointField, protowire.BytesType), point)
	message = protowire.AppendBytes(protowire.AppendTag(message, hookVMIField, protowire.BytesType), vmi)
	about := protowire.AppendString(protowire.AppendTag(nil, nodeNameField, protowire.BytesType), node)
	return protowire.AppendBytes(protowire.AppendTag(message, hookNodeField, protowire.BytesType), about)
}

// hook calls a node hook once, as virt-handler does.
func hook(arguments []string) error {
	flags := flag.NewFlagSet("hook", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	socket := flags.String("socket", "", "")
	point := flags.String("point", "", "")
	file := flags.String("vmi", "", "")
	node := flags.String("node", "", "")
	timeout := flags.Duration("timeout", hookTimeout, "")
	if err := flags.Parse(arguments); err != nil || *socket == "" || *point == "" || *file == "" || flags.NArg() > 0 {
		return errUsage{"cannot call a hook: --socket, --point and --vmi are needed, and nothing else"}
	}
	vmi, err := os.ReadFile(*file)
	if err != nil {
		return fmt.Errorf("cannot read the VMI: %w", err)
	}
	connection, err := grpc.NewClient("unix:"+*socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("cannot call %s: %w", *socket, err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	request, response := encodeHookRequest(*point, vmi, *node), []byte(nil)
	began := time.Now()
	err = connection.Invoke(ctx, hookMethod, &request, &response, grpc.ForceCodec(bytesCodec{}))
	if err != nil {
		answer := status.Convert(err)
		return fmt.Errorf("%s was refused (%s): %s", *point, answer.Code(), answer.Message())
	}
	fmt.Printf("{\"point\":%q,\"answered_after_ms\":%d}\n", *point, time.Since(began).Milliseconds())
	return nil
}
