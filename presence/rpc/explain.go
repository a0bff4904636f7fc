package rpc

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"headcount/presence"
)

// wireExplain is a question about a count as JSON. The answer is a presence.Parts.
type wireExplain struct {
	Page string `json:"page"`
}

// Explain asks the process at addr what it knows of the count of a page. Its errors are those of Hold.
func (c *Client) Explain(ctx context.Context, addr, page string) (parts presence.Parts, err error) {
	body, err := json.Marshal(wireExplain{page})
	if err != nil {
		return parts, fmt.Errorf("rpc: explain: %w", err)
	}

	answer, err := c.ask(ctx, addr, explainPath, body, http.StatusOK)
	if err != nil {
		return parts, fmt.Errorf("rpc: explain at %s: %w", addr, err)
	}
	if err := json.Unmarshal(answer, &parts); err != nil {
		return parts, fmt.Errorf("rpc: explain at %s: %w: %v", addr, presence.ErrUnavailable, err)
	}

	return parts, nil
}

// explain answers a question about a count.
func (h *Handler) explain(ctx context.Context, body []byte) ([]byte, error) {
	var asked wireExplain
	if err := json.Unmarshal(body, &asked); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}

	parts, err := h.cfg.Parts.ReceiveExplain(ctx, asked.Page)
	if err != nil {
		return nil, err
	}

	return json.Marshal(parts)
}
